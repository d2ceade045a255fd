/* A greedy verification in one call: the pass, what is accepted, what is emitted and what is left in the caches. */

#include "text.h"

struct verdict {
    int64_t *tokens;   /* [B, width] emitted: accepted drafts and the model's own token behind them */
    int64_t *counts;   /* [B] how many; a sequence ends at its first end token */
    int64_t *accepted; /* [B] drafts that are the model's own tokens */
    int64_t *lengths;  /* [B] of the sequences then */
    int64_t *kept;     /* [B] of them that caches may keep; `nothing_lost` where a sequence took no part */
    int64_t *fed;      /* [B] in this model's cache then */
    int64_t width, nothing_lost;
};

/* Writes the tokens emitted into the sequences as well. Returns the seconds of the pass. */
double verify(const struct model *m, struct pass *p, const struct text *t, const struct verdict *v)
{
    double seconds = feed(m, p, t);
    for (int64_t row = 0, output = 0; row < t->batch; row++) {
        int64_t start = t->start[row], drafted = t->lengths[row] - start, accepted = 0, count = 0;
        int64_t *tokens = t->tokens + row * t->stride + start;
        if (t->limits[row] > 0) {
            while (accepted < drafted && tokens[accepted] == largest(p, output + accepted))
                accepted++;
            tokens[accepted] = largest(p, output + accepted);
            while (count <= accepted) {
                v->tokens[row * v->width + count] = tokens[count];
                if (ends(t, row, tokens[count++]))
                    break;
            }
            output += drafted + 1;
        }
        for (int64_t rest = count; rest < v->width; rest++)
            v->tokens[row * v->width + rest] = 0;
        v->counts[row] = count;
        v->accepted[row] = accepted;
        v->lengths[row] = start + count;
        v->kept[row] = count ? start + count - 1 : v->nothing_lost;
        v->fed[row] = count ? start + count - 1 : t->fed[row];
    }
    return seconds;
}

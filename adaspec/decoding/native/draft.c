/* A window of greedy drafts of a model or a feature drafter in one call, all rows of the batch at once. */

#include "lanes.h"
#include "text.h"

struct window {
    float *joined;        /* [R, 2 hidden] a feature drafter's embeddings with states, or NULL */
    const float *states;  /* [R, hidden] what the pass taps, where there is joined */
    const int64_t *token; /* [head's outputs] the token of each logit, or NULL: its own number */
    int64_t *tokens;      /* [B, width] the draft, zeros where a row ends early */
    int64_t *counts;      /* [B] */
    int64_t *lengths;     /* [B] of the sequences then; and */
    int64_t *kept;        /* [B] of them in the model's cache: the last one is not fed */
    double *seconds;      /* [width] of each pass; the first is 0 where it had been made */
    int64_t width;
    float unsure;         /* a row ends behind a token whose law has more entropy than this */
};

/* -sum p ln p of p = softmax(x + top), where no x is above 0: ln z - sum x e^x / z. */
static float entropy(const float *logits, int64_t count, float top)
{
    v8 z = {0}, products = {0};
    for (int64_t first = 0; first < count; first += LANES) {
        v8 x = (v8){0} - 87.0f; /* e^-87 adds nothing */
        if (first + LANES <= count)
            x = load(logits + first) - top;
        else
            for (int64_t i = first; i < count; i++)
                x[i - first] = logits[i] - top;
        v8 weight = exponential(x);
        z += weight;
        products += weight * x;
    }
    return logf(sum(z)) - sum(products) / sum(z);
}

/* The pass over what the sequences lack; where it has been made, its logits are in place. */
static void begin(const struct model *m, struct pass *p, const struct text *t, const struct window *v)
{
    v->seconds[0] = 0.0;
    if (t->fed)
        v->seconds[0] = feed(m, p, t);
    else
        find_best(m, p);
    memset(v->tokens, 0, sizeof(int64_t) * (size_t)(t->batch * v->width));
    memset(v->counts, 0, sizeof(int64_t) * (size_t)t->batch);
    for (int64_t i = 0; i < p->outputs; i++) { /* from now on one entry for each row of the batch that drafts */
        p->sequence[i] = p->sequence[p->wanted[i]];
        p->position[i] = p->position[p->wanted[i]];
        p->wanted[i] = i;
    }
}

/* Drafts on from one row with logits for each row of the batch that takes part. Returns how many passes it took. */
int64_t draft(const struct model *m, struct pass *p, const struct text *t, const struct window *v)
{
    const int64_t hidden = m->hidden;
    const size_t size = sizeof(float) * (size_t)hidden;
    begin(m, p, t, v);
    int64_t passes = 1;
    for (;; passes++) {
        int64_t kept = 0;
        for (int64_t i = 0; i < p->outputs; i++) {
            const float *logits = p->logits + i * m->head.outputs;
            int64_t row = p->sequence[i], best = largest(p, i), token = v->token ? v->token[best] : best;
            int64_t count = v->counts[row]++;
            v->tokens[row * v->width + count] = t->tokens[row * t->stride + t->lengths[row] + count] = token;
            if (count + 1 == t->limits[row] || ends(t, row, token) ||
                (!isinf(v->unsure) && entropy(logits, p->considered, logits[best]) > v->unsure))
                continue;
            memcpy(v->joined ? v->joined + kept * 2 * hidden : p->x + kept * hidden, embedding(m, t, token), size);
            if (v->joined)
                memcpy(v->joined + (kept * 2 + 1) * hidden, v->states + i * hidden, size);
            p->sequence[kept] = row;
            p->position[kept++] = p->position[i] + 1;
        }
        if (!kept)
            break;
        p->rows = p->outputs = kept;
        v->seconds[passes] = timed(m, p);
    }
    for (int64_t row = 0; row < t->batch; row++) {
        v->lengths[row] = t->lengths[row] + v->counts[row];
        v->kept[row] = t->limits[row] > 0 ? v->lengths[row] - 1 : t->fed ? t->fed[row] : 0;
    }
    return passes;
}

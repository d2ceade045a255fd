/* A window of greedy drafts of a model or a feature drafter in one call, all rows of the batch at once. */

#include "lanes.h"
#include "model.h"

#include <time.h>

struct window {
    int64_t *sequence, *position;   /* [R] the arrays of the pass, which are overwritten: rows and slots; and */
    float *joined;                  /* a feature drafter's embeddings with states [R, 2 hidden], or NULL */
    const float *states;            /* [R, hidden] what the pass taps, where there is joined */
    const float *embedding;         /* [vocabulary, hidden] */
    const int64_t *token;           /* [head's outputs] the token of each logit, or NULL: its own number */
    const int64_t *limits;          /* [B] tokens asked for, at least 1 in the rows of the pass */
    const int64_t *ends;            /* [B, end_count] tokens that end a row */
    int64_t *tokens, *counts;       /* [B, width], [B] the draft; counts are 0 before */
    double *seconds;                /* [width - 1] of each pass */
    int64_t width, end_count, considered; /* logits that count, the first ones */
    float unsure;                   /* a row ends behind a token whose law has more entropy than this */
};

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static int64_t largest(const float *values, int64_t count)
{
    int64_t best = 0;
    for (int64_t i = 1; i < count; i++)
        best = values[i] > values[best] ? i : best;
    return best;
}

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

static int goes_on(const struct window *v, int64_t row, int64_t token, const float *logits, int64_t count, float top)
{
    for (int64_t i = 0; i < v->end_count; i++)
        if (v->ends[row * v->end_count + i] == token)
            return 0;
    return v->counts[row] < v->limits[row] && (isinf(v->unsure) || entropy(logits, count, top) <= v->unsure);
}

/* Drafts on from a pass that was made, with one row and its logits for each row of the batch that drafts. Returns how
   many passes it made. */
int64_t draft(const struct model *m, struct pass *p, const struct window *v)
{
    const int64_t hidden = m->hidden;
    const size_t size = sizeof(float) * (size_t)hidden;
    for (int64_t passes = 0;; passes++) {
        int64_t kept = 0;
        for (int64_t i = 0; i < p->rows; i++) {
            const float *logits = p->logits + i * m->head.outputs;
            int64_t row = v->sequence[i], best = largest(logits, v->considered), token = v->token ? v->token[best] : best;
            v->tokens[row * v->width + v->counts[row]++] = token;
            if (!goes_on(v, row, token, logits, v->considered, logits[best]))
                continue;
            memcpy(v->joined ? v->joined + kept * 2 * hidden : p->x + kept * hidden, v->embedding + token * hidden, size);
            if (v->joined)
                memcpy(v->joined + (kept * 2 + 1) * hidden, v->states + i * hidden, size);
            v->sequence[kept] = row;
            v->position[kept++] = v->position[i] + 1;
        }
        if (!kept)
            return passes;
        p->rows = p->outputs = kept;
        double began = now();
        forward(m, p);
        v->seconds[passes] = now() - began;
    }
}

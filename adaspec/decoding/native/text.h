/* The sequences of a batch: what a pass of a model reads of them, and what it writes behind them. */

#include "model.h"

struct text {
    int64_t *tokens;        /* [B, stride] */
    const int64_t *lengths; /* [B] tokens of each sequence, drafts included */
    const int64_t *start;   /* [B] of them in front of the drafts; the positions from start - 1 on get logits */
    const int64_t *fed;     /* [B] of them in the model's cache; NULL: the first pass has been made */
    const int64_t *limits;  /* [B] tokens asked for; 0: the sequence takes no part */
    const int64_t *ends;    /* [B, end_count] tokens that end it */
    const float *embedding; /* [embedded, hidden] */
    int64_t batch, stride, end_count, embedded;
};

/* Fills a pass with what the model lacks of the sequences that take part, and makes it. Returns its seconds. */
double feed(const struct model *m, struct pass *p, const struct text *t);

/* The seconds of a pass. */
double timed(const struct model *m, const struct pass *p);

/* Whether a token ends a sequence. */
int ends(const struct text *t, int64_t row, int64_t token);

/* What enters the first layer for a token. */
const float *embedding(const struct model *m, const struct text *t, int64_t token);

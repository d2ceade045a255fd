/* Sequences and passes over them. */

#include "text.h"

#include <string.h>
#include <time.h>

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

double timed(const struct model *m, const struct pass *p)
{
    double began = now();
    forward(m, p);
    return now() - began;
}

int ends(const struct text *t, int64_t row, int64_t token)
{
    for (int64_t i = 0; i < t->end_count; i++)
        if (t->ends[row * t->end_count + i] == token)
            return 1;
    return 0;
}

const float *embedding(const struct model *m, const struct text *t, int64_t token)
{
    return t->embedding + (token < t->embedded ? token : t->embedded - 1) * m->hidden;
}

double feed(const struct model *m, struct pass *p, const struct text *t)
{
    p->rows = p->outputs = 0;
    for (int64_t row = 0; row < t->batch; row++)
        for (int64_t at = t->fed[row]; t->limits[row] > 0 && at < t->lengths[row]; at++) {
            p->sequence[p->rows] = row;
            p->position[p->rows] = at;
            memcpy(p->x + p->rows * m->hidden, embedding(m, t, t->tokens[row * t->stride + at]),
                   sizeof(float) * (size_t)m->hidden);
            if (at >= t->start[row] - 1)
                p->wanted[p->outputs++] = p->rows;
            p->rows++;
        }
    return timed(m, p);
}

/* Y = X W^T: each output one chain of multiply-adds over the inputs in a fixed order, whatever rows are beside it.

   Weights are stored in panels of 2 outputs, each panel [inputs / 8, 2 outputs, 8 inputs] (int4: in blocks, see there):
   whatever shape of tile works on them, it reads them front to back. */

#include "int4.h"
#include "model.h"

#define PANEL 2 /* outputs that are stored together */
#define UNIT 8  /* outputs that threads share out together: whole panels, whole blocks */
#define ROWS 48 /* rows that go through all weights together */

INLINE int64_t bytes_of(enum kind kind) { return kind == FLOAT32 ? 4 : kind == FLOAT16 ? 2 : 1; }

INLINE v8 weight_at(enum kind kind, const void *at)
{
    return kind == FLOAT16 ? widen_half(at) : kind == INT8 ? widen_byte(at) : load(at);
}

struct product {
    const float *x; /* [rows, x_stride] */
    float *y;       /* [rows, y_stride] */
    int64_t rows, x_stride, y_stride;
    int add; /* to what y holds */
};

INLINE void put(const struct linear *w, const struct product *p, int64_t row, int64_t output, float value)
{
    float *y = p->y + row * p->y_stride + output;
    value = w->bias ? value + w->bias[output] : value;
    *y = p->add ? *y + value : value;
}

/* Up to 6 rows by the outputs of a panel: 12 sums fit into the registers. */
INLINE void tile(const int rows, enum kind kind, const struct linear *w, int64_t first, const struct product *p, int64_t row)
{
    const int64_t width = w->inputs, stride = p->x_stride;
    const float *x = p->x + row * stride;
    const char *panel = (const char *)w->weight + first * width * bytes_of(kind);
    v8 sums[6][PANEL];
#pragma GCC unroll 8
    for (int m = 0; m < rows; m++)
#pragma GCC unroll 8
        for (int n = 0; n < PANEL; n++)
            sums[m][n] = (v8){0};
    for (int64_t i = 0; i < width; i += LANES) {
        const char *at = panel + i * PANEL * bytes_of(kind);
        __builtin_prefetch(at + AHEAD);
        v8 weights[PANEL];
#pragma GCC unroll 8
        for (int n = 0; n < PANEL; n++)
            weights[n] = weight_at(kind, at + n * LANES * bytes_of(kind));
#pragma GCC unroll 8
        for (int m = 0; m < rows; m++) {
            v8 inputs = load(x + m * stride + i);
#pragma GCC unroll 8
            for (int n = 0; n < PANEL; n++)
                sums[m][n] = multiply_add(weights[n], inputs, sums[m][n]);
        }
    }
    for (int m = 0; m < rows; m++)
        for (int n = 0; n < PANEL && first + n < w->outputs; n++) {
            float value = sum(sums[m][n]);
            put(w, p, row + m, first + n, kind == INT8 ? value * w->scale[first + n] : value);
        }
}

INLINE void outputs_of(enum kind kind, const struct linear *w, int64_t from, int64_t to, const struct product *p)
{
    for (int64_t first = from; first < to; first += PANEL) {
        int64_t row = 0;
        for (; row + 6 <= p->rows; row += 6)
            tile(6, kind, w, first, p, row);
        switch (p->rows - row) {
        case 5: tile(5, kind, w, first, p, row); break;
        case 4: tile(4, kind, w, first, p, row); break;
        case 3: tile(3, kind, w, first, p, row); break;
        case 2: tile(2, kind, w, first, p, row); break;
        case 1: tile(1, kind, w, first, p, row); break;
        }
    }
}

/* Outputs from .. to of every row; `from` is a multiple of OUTPUTS. */
static void int4_outputs(const struct linear *w, int64_t from, int64_t to, const struct product *p)
{
    const int64_t groups = groups_of(w->inputs);
    int8_t codes[INT4_ROWS * groups * GROUP];
    float scales[INT4_ROWS * groups], totals[INT4_ROWS * groups];
    struct codes x[INT4_ROWS];
    for (int64_t start = 0; start < p->rows; start += INT4_ROWS) {
        const int64_t rows = p->rows - start < INT4_ROWS ? p->rows - start : INT4_ROWS;
        for (int64_t m = 0; m < rows; m++) {
            x[m] = (struct codes){codes + m * groups * GROUP, scales + m * groups, totals + m * groups};
            int4_codes(p->x + (start + m) * p->x_stride, w->inputs, codes + m * groups * GROUP, scales + m * groups,
                       totals + m * groups);
        }
        for (int64_t first = from; first < to; first += OUTPUTS) {
            const struct block *blocks = (const struct block *)w->weight + first / OUTPUTS * groups;
            v8 sums[INT4_ROWS];
            int64_t row = 0;
            for (; row + 4 <= rows; row += 4)
                int4_tile(4, blocks, groups, x + row, sums + row);
            switch (rows - row) {
            case 3: int4_tile(3, blocks, groups, x + row, sums + row); break;
            case 2: int4_tile(2, blocks, groups, x + row, sums + row); break;
            case 1: int4_tile(1, blocks, groups, x + row, sums + row); break;
            }
            for (int64_t m = 0; m < rows; m++)
                for (int n = 0; n < OUTPUTS && first + n < w->outputs; n++)
                    put(w, p, start + m, first + n, sums[m][n]);
        }
    }
}

/* Outputs from .. to of every row, so many rows at a time that they stay in the cache. */
static void multiply(const struct linear *w, int64_t from, int64_t to, struct product p)
{
    for (int64_t left = p.rows; left > 0; left -= ROWS, p.x += ROWS * p.x_stride, p.y += ROWS * p.y_stride) {
        p.rows = left < ROWS ? left : ROWS;
        if (w->kind == INT4)
            int4_outputs(w, from, to, &p);
        else if (w->kind == FLOAT16)
            outputs_of(FLOAT16, w, from, to, &p);
        else if (w->kind == INT8)
            outputs_of(INT8, w, from, to, &p);
        else
            outputs_of(FLOAT32, w, from, to, &p);
    }
}

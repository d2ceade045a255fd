/* Y = X W^T: each output one chain of multiply-adds over the inputs in a fixed order, whatever rows are beside it.

   Weights are stored in panels of 2 outputs, each panel [inputs / WIDE, 2 outputs, WIDE inputs], filled up
   with zeros (int4: in blocks, see there):
   whatever shape of tile works on them, it reads them front to back. */

#include "int4.h"
#include "model.h"

/* As many numbers as the processor multiplies at once. */
#if defined(__AVX512F__) && defined(__AVX512DQ__)
#define WIDE 16
typedef float wide __attribute__((vector_size(64), aligned(4), may_alias));
#else
#define WIDE LANES
typedef v8 wide;
#endif

#define PANEL 2 /* outputs that are stored together */
#define UNIT 8  /* outputs that threads share out together: whole panels, whole blocks */
#define ROWS 48 /* rows that go through all weights together */

INLINE int64_t bytes_of(enum kind kind) { return kind == FLOAT32 ? 4 : kind == FLOAT16 ? 2 : 1; }

#if defined(__AVX512F__) && defined(__AVX512DQ__)

INLINE wide wide_weight(enum kind kind, const void *at)
{
    if (kind == FLOAT16)
        return (wide)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)at));
    if (kind == INT8)
        return (wide)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)at)));
    return *(const wide *)at;
}

/* Eight or sixteen inputs. */
INLINE wide wide_input(const float *from, int64_t left)
{
    return left >= WIDE ? *(const wide *)from : (wide)_mm512_zextps256_ps512((__m256)load(from));
}

INLINE wide wide_multiply_add(wide a, wide b, wide c)
{
    return (wide)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}

INLINE float wide_sum(wide v)
{
    return sum((v8)_mm512_castps512_ps256((__m512)v) + (v8)_mm512_extractf32x8_ps((__m512)v, 1));
}

#else

INLINE v8 widen_byte(const int8_t *from)
{
#if defined(__AVX2__) && defined(__F16C__)
    return (v8)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from)));
#else
    v8 wide;
    for (int lane = 0; lane < LANES; lane++)
        wide[lane] = (float)from[lane];
    return wide;
#endif
}

INLINE wide wide_weight(enum kind kind, const void *at)
{
    return kind == FLOAT16 ? widen_half(at) : kind == INT8 ? widen_byte(at) : load(at);
}

INLINE wide wide_input(const float *from, int64_t left)
{
    (void)left;
    return load(from);
}

INLINE wide wide_multiply_add(wide a, wide b, wide c) { return multiply_add(a, b, c); }

INLINE float wide_sum(wide v) { return sum(v); }

#endif

/* How many inputs of an output stand together in a panel. */
int64_t panel_width(void) { return WIDE; }

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
    const int64_t width = w->inputs, padded = (width + WIDE - 1) / WIDE * WIDE, stride = p->x_stride;
    const float *x = p->x + row * stride;
    const char *panel = (const char *)w->weight + first * padded * bytes_of(kind);
    wide sums[6][PANEL];
#pragma GCC unroll 8
    for (int m = 0; m < rows; m++)
#pragma GCC unroll 8
        for (int n = 0; n < PANEL; n++)
            sums[m][n] = (wide){0};
    for (int64_t i = 0; i < width; i += WIDE) {
        const char *at = panel + i * PANEL * bytes_of(kind);
        __builtin_prefetch(at + AHEAD);
        wide weights[PANEL];
#pragma GCC unroll 8
        for (int n = 0; n < PANEL; n++)
            weights[n] = wide_weight(kind, at + n * WIDE * bytes_of(kind));
#pragma GCC unroll 8
        for (int m = 0; m < rows; m++) {
            wide inputs = wide_input(x + m * stride + i, width - i);
#pragma GCC unroll 8
            for (int n = 0; n < PANEL; n++)
                sums[m][n] = wide_multiply_add(weights[n], inputs, sums[m][n]);
        }
    }
    for (int m = 0; m < rows; m++)
        for (int n = 0; n < PANEL && first + n < w->outputs; n++) {
            float value = wide_sum(sums[m][n]);
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

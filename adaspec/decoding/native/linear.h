/* Y = X W^T: each output one chain of multiply-adds over the inputs in a fixed order, whatever rows are beside it.

   Weights are stored in panels of PANEL outputs, [inputs, PANEL], filled up with zeros (int4: in blocks, see there):
   whatever shape of tile works on them, it reads them front to back, and an output has a lane of its own, so nothing is
   summed across lanes. */

#include "int4.h"
#include "model.h"

/* As many numbers as the processor multiplies at once, and the rows whose sums fit into its registers. */
#if defined(__AVX512F__)
#define WIDE 16
typedef float wide __attribute__((vector_size(64), aligned(4), may_alias));
#define PAIR_ROWS 5   /* by two panels */
#define PANEL_ROWS 10 /* by one */
#define SHAPES(X)                                                                                                      \
    X(1, 1) X(2, 1) X(3, 1) X(4, 1) X(5, 1) X(6, 1) X(7, 1) X(8, 1) X(9, 1) X(10, 1)                                   \
    X(1, 2) X(2, 2) X(3, 2) X(4, 2) X(5, 2)
#else
#define WIDE LANES
typedef v8 wide;
#define PAIR_ROWS 2
#define PANEL_ROWS 6
#define SHAPES(X) X(1, 1) X(2, 1) X(3, 1) X(4, 1) X(5, 1) X(6, 1) X(1, 2) X(2, 2)
#endif

#define PANEL (2 * WIDE) /* outputs that are stored together, and that threads share out together */
#define CHUNK 256        /* inputs that are summed in one go; the sums of the chunks are added up in order */
#define ROWS 48          /* rows that go through all weights together */

INLINE int64_t bytes_of(enum kind kind) { return kind == FLOAT32 ? 4 : kind == FLOAT16 ? 2 : 1; }

#if defined(__AVX512F__)

INLINE wide wide_weight(enum kind kind, const void *at)
{
    if (kind == FLOAT16)
        return (wide)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)at));
    if (kind == INT8)
        return (wide)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)at)));
    return *(const wide *)at;
}

INLINE wide wide_all(float value) { return (wide)_mm512_set1_ps(value); }

INLINE wide wide_multiply_add(wide a, wide b, wide c)
{
    return (wide)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
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

INLINE wide wide_all(float value) { return all(value); }

INLINE wide wide_multiply_add(wide a, wide b, wide c) { return multiply_add(a, b, c); }

#endif

/* How many outputs stand together in a panel. */
int64_t panel_width(void) { return PANEL; }

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

INLINE void put_wide(enum kind kind, const struct linear *w, const struct product *p, int64_t row, int64_t output, wide value)
{
    if (output + WIDE > w->outputs) {
        for (int lane = 0; lane < WIDE && output + lane < w->outputs; lane++)
            put(w, p, row, output + lane, kind == INT8 ? value[lane] * w->scale[output + lane] : value[lane]);
        return;
    }
    wide *y = (wide *)(p->y + row * p->y_stride + output);
    if (kind == INT8)
        value *= *(const wide *)(w->scale + output);
    if (w->bias)
        value += *(const wide *)(w->bias + output);
    if (p->add)
        value += *y;
    *y = value;
}

/* Some rows by the outputs of one or two panels. */
INLINE void tile(const int rows, const int panels, enum kind kind, const struct linear *w, int64_t first,
                 const struct product *p, int64_t row)
{
    const int64_t stride = p->x_stride, step = PANEL * bytes_of(kind), size = w->inputs * step;
    const float *x = p->x + row * stride;
    const char *weight = (const char *)w->weight + first / PANEL * size;
    const int parts = 2 * panels;
    wide totals[PANEL_ROWS][4] = {{{0}}}, sums[PANEL_ROWS][4];
    for (int64_t start = 0; start < w->inputs; start += CHUNK) {
        const int64_t end = start + CHUNK < w->inputs ? start + CHUNK : w->inputs;
#pragma GCC unroll 12
        for (int m = 0; m < rows; m++)
#pragma GCC unroll 4
            for (int n = 0; n < parts; n++)
                sums[m][n] = (wide){0};
#pragma GCC unroll 4
        for (int64_t i = start; i < end; i++) {
            wide weights[4];
#pragma GCC unroll 4
            for (int n = 0; n < parts; n++) {
                const char *at = weight + n / 2 * size + i * step;
                if (n % 2 == 0)
                    __builtin_prefetch(at + AHEAD / panels);
                weights[n] = wide_weight(kind, at + n % 2 * WIDE * bytes_of(kind));
            }
#pragma GCC unroll 12
            for (int m = 0; m < rows; m++) {
                wide input = wide_all(x[m * stride + i]);
#pragma GCC unroll 4
                for (int n = 0; n < parts; n++)
                    sums[m][n] = wide_multiply_add(weights[n], input, sums[m][n]);
            }
        }
#pragma GCC unroll 12
        for (int m = 0; m < rows; m++)
#pragma GCC unroll 4
            for (int n = 0; n < parts; n++)
                totals[m][n] += sums[m][n];
        __asm__ volatile("" : : "r"(totals) : "memory"); /* they stay in memory, so that the sums fit into registers */
    }
    for (int m = 0; m < rows; m++)
        for (int n = 0; n < parts; n++)
            put_wide(kind, w, p, row + m, first + n * WIDE, totals[m][n]);
}

typedef void shape(const struct linear *w, int64_t first, const struct product *p, int64_t row);

/* Every shape of tile is a function of its own: so the compiler finds registers for all sums, and is soon done. */
#define DEFINE(NUMBER, PANELS)                                                                                         \
    static __attribute__((noinline)) void tile_##NUMBER##_##PANELS(const struct linear *w, int64_t first,              \
                                                                   const struct product *p, int64_t row)               \
    {                                                                                                                  \
        if (w->kind == FLOAT16)                                                                                        \
            tile(NUMBER, PANELS, FLOAT16, w, first, p, row);                                                           \
        else if (w->kind == INT8)                                                                                      \
            tile(NUMBER, PANELS, INT8, w, first, p, row);                                                              \
        else                                                                                                           \
            tile(NUMBER, PANELS, FLOAT32, w, first, p, row);                                                           \
    }
SHAPES(DEFINE)

#define ENTRY(NUMBER, PANELS) [PANELS][NUMBER] = tile_##NUMBER##_##PANELS,
static shape *const TILES[3][PANEL_ROWS + 1] = {SHAPES(ENTRY)};

static void outputs_of(const struct linear *w, int64_t from, int64_t to, const struct product *p)
{
    int64_t first = from;
    if (p->rows <= PAIR_ROWS)
        for (; first + PANEL < to; first += 2 * PANEL)
            TILES[2][p->rows](w, first, p, 0);
    for (; first < to; first += PANEL)
        for (int64_t row = 0; row < p->rows; row += PANEL_ROWS)
            TILES[1][p->rows - row < PANEL_ROWS ? p->rows - row : PANEL_ROWS](w, first, p, row);
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
        else
            outputs_of(w, from, to, &p);
    }
}

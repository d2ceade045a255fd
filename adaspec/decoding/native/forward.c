/* One pass of a Llama-like decoder over R rows, on a CPU.

   A row is one position of one sequence. All rows of a pass share each weight that is read, so a pass over a few rows
   takes hardly longer than a pass over one. And a row's result is the same bits whatever rows are beside it, by
   construction: every output is one chain of multiply-adds over the inputs in a fixed order, a row attends to the slots
   up to its own position and sees no other, and threads share out outputs, never a sum.

   Layouts: rows [R, width] float; caches [B, kv_heads, slots, head_dim]; weights in panels of 2 outputs, each panel
   [inputs / 8, 2 outputs, 8 inputs]: whatever shape of tile works on them, it reads them front to back. */

#include <math.h>
#ifdef _OPENMP
#include <omp.h>
#endif
#include <stdint.h>
#include <string.h>
#include <time.h>
#if defined(__AVX2__) && defined(__F16C__)
#include <immintrin.h>
#endif

typedef float v8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t i8 __attribute__((vector_size(32), aligned(4), may_alias));
#define INLINE static inline __attribute__((always_inline))
#define LANES 8
#define PANEL 2    /* outputs that are stored together */
#define BLOCK 8    /* outputs whose weights stay at hand while all rows use them */
#define ROWS 48    /* rows that go through all weights together */
#define AHEAD 2048 /* bytes of weights that are asked of the memory before they are used */

enum kind { FLOAT32, FLOAT16, INT8 };

struct linear {
    const void *weight; /* [outputs / 2, inputs / 8, 2, 8] of kind */
    const float *scale; /* [outputs], INT8 only */
    const float *bias;  /* [outputs] or NULL */
    int64_t outputs, inputs;
    int32_t kind;
};

struct layer {
    struct linear qkv, out, gate_up, down; /* q, k, v stacked; gate, up stacked */
    const float *attention_norm, *mlp_norm; /* [hidden] */
    const float *query_norm, *key_norm;     /* [head_dim] or NULL */
    float *keys, *values;                   /* [B, kv_heads, slots, head_dim] */
};

struct model {
    const struct layer *layers;
    const float *final_norm; /* [hidden] */
    struct linear join;      /* what enters the first layer, of wider rows; without a weight: the rows themselves */
    struct linear head;
    int64_t layer_count, hidden, heads, kv_heads, head_dim, inner, slots;
    float epsilon, scale;
};

struct pass {
    int64_t rows, outputs;      /* R; how many of them get logits */
    const int64_t *sequence;    /* [R] index into the caches' B */
    const int64_t *position;    /* [R] slot that the row writes; it attends to 0 .. position */
    const float *cosine, *sine; /* [R, head_dim] */
    const int64_t *wanted;      /* [outputs] rows that get logits */
    const float *joined;        /* [R, join.inputs], where there is a join */
    float *x;                   /* [R, hidden]: embeddings (of a join: anything), overwritten */
    float *logits;              /* [outputs, vocabulary] */
    float *const *taps;         /* [layer_count]: where to put the state behind each layer [R, hidden], or NULL; behind
                                   the last one: as the head reads it, after the final norm */
    float *scratch;             /* scratch_size() floats */
    int64_t threads;
};

/* Arithmetic on eight lanes. */

INLINE v8 load(const float *from) { return *(const v8 *)from; }

INLINE v8 widen_half(const uint16_t *from)
{
#if defined(__AVX2__) && defined(__F16C__)
    return (v8)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
#else
    v8 wide;
    for (int lane = 0; lane < LANES; lane++) {
        _Float16 half;
        memcpy(&half, from + lane, sizeof half);
        wide[lane] = (float)half;
    }
    return wide;
#endif
}

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

INLINE int64_t bytes_of(enum kind kind) { return kind == FLOAT32 ? 4 : kind == FLOAT16 ? 2 : 1; }

INLINE v8 weight_at(enum kind kind, const void *at)
{
    return kind == FLOAT16 ? widen_half(at) : kind == INT8 ? widen_byte(at) : load(at);
}

/* a * b + c, rounded once where the processor can; the compiler itself must not choose (-ffp-contract=off). */
INLINE v8 multiply_add(v8 a, v8 b, v8 c)
{
#if defined(__FMA__)
    return (v8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

INLINE float sum(v8 v) { return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7])); }

/* e^x, to 2e-7 of the result, for x up to 88: x = n ln 2 + r, then a polynomial for e^r (Cephes). */
INLINE v8 exponential(v8 x)
{
    v8 low = {-87.0f, -87.0f, -87.0f, -87.0f, -87.0f, -87.0f, -87.0f, -87.0f};
    i8 above = x > low;
    x = (v8)(((i8)x & above) | ((i8)low & ~above));
    v8 n = x * 1.44269504f + 12582912.0f - 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    v8 r = x - n * 0.693359375f + n * 2.12194440e-4f;
    v8 p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    i8 bits = (__builtin_convertvector(n, i8) + 127) << 23;
    return p * (v8)bits;
}

/* Y = X W^T, each output one chain over the inputs. */

struct product {
    const float *x; /* [rows, x_stride] */
    float *y;       /* [rows, y_stride] */
    int64_t rows, x_stride, y_stride;
    int add; /* to what y holds */
};

/* Up to 6 rows by the outputs of some panels: at most 12 sums, which fit into the registers, and with few rows at least
   8, as a sum must wait for itself. */
INLINE void tile(const int rows, const int panels, enum kind kind, const struct linear *w, int64_t first,
                 const struct product *p, int64_t row)
{
    const int64_t width = w->inputs, stride = p->x_stride, panel = PANEL * width * bytes_of(kind);
    const float *x = p->x + row * stride;
    const char *weight = (const char *)w->weight + first * width * bytes_of(kind);
    v8 sums[6][4 * PANEL];
#pragma GCC unroll 8
    for (int m = 0; m < rows; m++)
#pragma GCC unroll 8
        for (int n = 0; n < panels * PANEL; n++)
            sums[m][n] = (v8){0};
    for (int64_t i = 0; i < width; i += LANES) {
        const char *at = weight + i * PANEL * bytes_of(kind);
        v8 weights[4 * PANEL];
#pragma GCC unroll 8
        for (int n = 0; n < panels * PANEL; n++) {
            const char *here = at + n / PANEL * panel + n % PANEL * LANES * bytes_of(kind);
            if (n % PANEL == 0)
                __builtin_prefetch(here + AHEAD);
            weights[n] = weight_at(kind, here);
        }
#pragma GCC unroll 8
        for (int m = 0; m < rows; m++) {
            v8 inputs = load(x + m * stride + i);
#pragma GCC unroll 8
            for (int n = 0; n < panels * PANEL; n++)
                sums[m][n] = multiply_add(weights[n], inputs, sums[m][n]);
        }
    }
    for (int m = 0; m < rows; m++)
        for (int n = 0; n < panels * PANEL && first + n < w->outputs; n++) {
            float value = sum(sums[m][n]);
            if (kind == INT8)
                value *= w->scale[first + n];
            if (w->bias)
                value += w->bias[first + n];
            float *y = p->y + (row + m) * p->y_stride + first + n;
            *y = p->add ? *y + value : value;
        }
}

INLINE void tiles(const int rows, const int panels, enum kind kind, const struct linear *w, int64_t from, int64_t to,
                  const struct product *p, int64_t row)
{
    int64_t first = from;
    for (; first + panels * PANEL <= to; first += panels * PANEL)
        tile(rows, panels, kind, w, first, p, row);
    for (; first < to; first += PANEL)
        tile(rows, 1, kind, w, first, p, row);
}

INLINE void outputs_of(enum kind kind, const struct linear *w, int64_t from, int64_t to, const struct product *p)
{
    for (int64_t first = from; first < to; first += BLOCK) {
        int64_t end = first + BLOCK < to ? first + BLOCK : to, row = 0;
        for (; row + 6 <= p->rows; row += 6)
            tiles(6, 1, kind, w, first, end, p, row);
        switch (p->rows - row) {
        case 5: tiles(5, 1, kind, w, first, end, p, row); break;
        case 4: tiles(4, 1, kind, w, first, end, p, row); break;
        case 3: tiles(3, 2, kind, w, first, end, p, row); break;
        case 2: tiles(2, 2, kind, w, first, end, p, row); break;
        case 1: tiles(1, 4, kind, w, first, end, p, row); break;
        }
    }
}

/* Outputs from .. to of every row, so many rows at a time that they stay in the cache. */
static void multiply(const struct linear *w, int64_t from, int64_t to, struct product p)
{
    for (int64_t left = p.rows; left > 0; left -= ROWS, p.x += ROWS * p.x_stride, p.y += ROWS * p.y_stride) {
        p.rows = left < ROWS ? left : ROWS;
        if (w->kind == FLOAT16)
            outputs_of(FLOAT16, w, from, to, &p);
        else if (w->kind == INT8)
            outputs_of(INT8, w, from, to, &p);
        else
            outputs_of(FLOAT32, w, from, to, &p);
    }
}

/* The parts of a layer, each for one row. */

static void normalise(const float *x, const float *weight, int64_t width, float epsilon, float *y)
{
    v8 squares = {0};
    for (int64_t i = 0; i < width; i += LANES)
        squares = multiply_add(load(x + i), load(x + i), squares);
    float factor = 1.0f / sqrtf(sum(squares) / (float)width + epsilon);
    for (int64_t i = 0; i < width; i++)
        y[i] = weight[i] * (x[i] * factor);
}

/* Rotates the two halves of a head by the position's angles (the layout of Llama in transformers). */
static void rotate(float *head, const float *cosine, const float *sine, int64_t width)
{
    int64_t half = width / 2;
    for (int64_t i = 0; i < half; i++) {
        float low = head[i], high = head[i + half];
        head[i] = low * cosine[i] - high * sine[i];
        head[i + half] = high * cosine[i + half] + low * sine[i + half];
    }
}

static void attend(const float *query, const float *keys, const float *values, int64_t slots, int64_t width, float scale,
                   float *scores, float *y)
{
    int64_t padded = (slots + LANES - 1) / LANES * LANES;
    float largest = -INFINITY;
    for (int64_t slot = 0; slot < slots; slot++) {
        v8 products = {0};
        for (int64_t i = 0; i < width; i += LANES)
            products = multiply_add(load(query + i), load(keys + slot * width + i), products);
        scores[slot] = sum(products) * scale;
        largest = scores[slot] > largest ? scores[slot] : largest;
    }
    for (int64_t slot = slots; slot < padded; slot++)
        scores[slot] = -INFINITY;
    v8 total = {0};
    for (int64_t slot = 0; slot < padded; slot += LANES) {
        v8 weight = exponential(load(scores + slot) - largest);
        for (int lane = 0; lane < LANES; lane++)
            weight[lane] = slot + lane < slots ? weight[lane] : 0.0f;
        *(v8 *)(scores + slot) = weight;
        total += weight;
    }
    memset(y, 0, sizeof(float) * (size_t)width);
    for (int64_t slot = 0; slot < slots; slot++) {
        v8 weight = (v8){0} + scores[slot];
        for (int64_t i = 0; i < width; i += LANES)
            *(v8 *)(y + i) = multiply_add(weight, load(values + slot * width + i), load(y + i));
    }
    float factor = 1.0f / sum(total);
    for (int64_t i = 0; i < width; i += LANES)
        *(v8 *)(y + i) *= factor;
}

/* silu(gate) * up, for columns from .. to of one row; the result replaces the gate. */
static void gate(float *gates, const float *ups, int64_t from, int64_t to)
{
    int64_t i = from;
    for (; i + LANES <= to; i += LANES) {
        v8 g = load(gates + i);
        *(v8 *)(gates + i) = g / (1.0f + exponential(-g)) * load(ups + i);
    }
    for (; i < to; i++) {
        v8 g = {gates[i]};
        gates[i] = gates[i] / (1.0f + exponential(-g)[0]) * ups[i];
    }
}

struct worker {
    int64_t index, team; /* this thread, and how many there are */
    float *normed, *qkv, *mixed, *inner; /* shared by the team: [R, ...] */
    float *scores;                       /* its own: [slots] */
};

static int64_t qkv_width(const struct model *m) { return (m->heads + 2 * m->kv_heads) * m->head_dim; }

static struct worker worker(const struct model *m, const struct pass *p)
{
    struct worker w = {.index = 0, .team = 1, .normed = p->scratch};
#ifdef _OPENMP
    w.index = omp_get_thread_num();
    w.team = omp_get_num_threads();
#endif
    w.qkv = w.normed + p->rows * m->hidden;
    w.mixed = w.qkv + p->rows * qkv_width(m);
    w.inner = w.mixed + p->rows * m->heads * m->head_dim;
    w.scores = w.inner + p->rows * 2 * m->inner + w.index * (m->slots + LANES);
    return w;
}

int64_t scratch_size(const struct model *m, int64_t rows, int64_t threads)
{
    int64_t per_row = m->hidden + qkv_width(m) + m->heads * m->head_dim + 2 * m->inner;
    return rows * per_row + threads * (m->slots + LANES);
}

/* The worker's share of `count` items, in whole units. */
static void share(int64_t count, int64_t unit, const struct worker *w, int64_t *from, int64_t *to)
{
    int64_t units = (count + unit - 1) / unit;
    *from = units * w->index / w->team * unit;
    *to = units * (w->index + 1) / w->team * unit;
    *to = *to < count ? *to : count;
}

#define BARRIER _Pragma("omp barrier")

static void attention(const struct model *m, const struct layer *l, const struct pass *p, const struct worker *w)
{
    const int64_t heads = m->heads, kv = m->kv_heads, width = m->head_dim, all = heads + 2 * kv;
    int64_t from, to;
    share(l->qkv.outputs, PANEL, w, &from, &to);
    multiply(&l->qkv, from, to, (struct product){w->normed, w->qkv, p->rows, m->hidden, l->qkv.outputs, 0});
    BARRIER
    share(p->rows * all, 1, w, &from, &to);
    for (int64_t item = from; item < to; item++) {
        int64_t row = item / all, head = item % all;
        float *at = w->qkv + (row * all + head) * width;
        int key = head >= heads && head < heads + kv;
        const float *norm = head < heads ? l->query_norm : key ? l->key_norm : NULL;
        if (norm)
            normalise(at, norm, width, m->epsilon, at);
        if (head < heads + kv)
            rotate(at, p->cosine + row * width, p->sine + row * width, width);
        if (head >= heads) {
            int64_t place = (p->sequence[row] * kv + (head - heads) % kv) * m->slots + p->position[row];
            memcpy((key ? l->keys : l->values) + place * width, at, sizeof(float) * (size_t)width);
        }
    }
    BARRIER
    share(p->rows * heads, 1, w, &from, &to);
    for (int64_t item = from; item < to; item++) {
        int64_t row = item / heads, head = item % heads;
        int64_t cache = (p->sequence[row] * kv + head / (heads / kv)) * m->slots * width;
        attend(w->qkv + (row * all + head) * width, l->keys + cache, l->values + cache, p->position[row] + 1, width, m->scale,
               w->scores, w->mixed + item * width);
    }
    BARRIER
    share(m->hidden, PANEL, w, &from, &to);
    multiply(&l->out, from, to, (struct product){w->mixed, p->x, p->rows, l->out.inputs, m->hidden, 1});
    BARRIER
}

static void mlp(const struct model *m, const struct layer *l, const struct pass *p, const struct worker *w)
{
    int64_t from, to;
    share(m->inner, PANEL, w, &from, &to);
    const int64_t both = 2 * m->inner;
    struct product product = {w->normed, w->inner, p->rows, m->hidden, both, 0};
    multiply(&l->gate_up, from, to, product);
    multiply(&l->gate_up, m->inner + from, m->inner + to, product);
    for (int64_t row = 0; row < p->rows; row++)
        gate(w->inner + row * both, w->inner + row * both + m->inner, from, to);
    BARRIER
    share(m->hidden, PANEL, w, &from, &to);
    multiply(&l->down, from, to, (struct product){w->inner, p->x, p->rows, both, m->hidden, 1});
    BARRIER
}

static void normalise_rows(const struct model *m, const struct pass *p, const float *weight, float *y, const struct worker *w)
{
    int64_t from, to;
    share(p->rows, 1, w, &from, &to);
    for (int64_t row = from; row < to; row++)
        normalise(p->x + row * m->hidden, weight, m->hidden, m->epsilon, y + row * m->hidden);
    BARRIER
}

static void tap(const struct model *m, const struct pass *p, int64_t index, const float *x, const struct worker *w)
{
    if (w->index == 0 && p->taps[index])
        memcpy(p->taps[index], x, sizeof(float) * (size_t)(p->rows * m->hidden));
}

static void head(const struct model *m, const struct pass *p, const struct worker *w)
{
    normalise_rows(m, p, m->final_norm, w->normed, w);
    tap(m, p, m->layer_count - 1, w->normed, w);
    int64_t from, to;
    share(p->outputs, 1, w, &from, &to);
    for (int64_t row = from; row < to; row++)
        memcpy(p->x + row * m->hidden, w->normed + p->wanted[row] * m->hidden, sizeof(float) * (size_t)m->hidden);
    BARRIER
    share(m->head.outputs, PANEL, w, &from, &to);
    multiply(&m->head, from, to, (struct product){p->x, p->logits, p->outputs, m->hidden, m->head.outputs, 0});
}

static void join(const struct model *m, const struct pass *p, const struct worker *w)
{
    if (!m->join.weight)
        return;
    int64_t from, to;
    share(m->hidden, PANEL, w, &from, &to);
    multiply(&m->join, from, to, (struct product){p->joined, p->x, p->rows, m->join.inputs, m->hidden, 0});
    BARRIER
}

void forward(const struct model *m, const struct pass *p)
{
#pragma omp parallel num_threads(p->threads)
    {
        const struct worker w = worker(m, p);
        join(m, p, &w);
        for (int64_t index = 0; index < m->layer_count; index++) {
            const struct layer *l = m->layers + index;
            normalise_rows(m, p, l->attention_norm, w.normed, &w);
            attention(m, l, p, &w);
            normalise_rows(m, p, l->mlp_norm, w.normed, &w);
            mlp(m, l, p, &w);
            if (index + 1 < m->layer_count)
                tap(m, p, index, p->x, &w);
        }
        head(m, p, &w);
    }
}

/* Only the products of a pass, of whatever x holds: what the rest of it costs is the difference. The results go to the
   scratch, [widest layer's outputs] floats; x is [R, widest layer's inputs] here. */
void products(const struct model *m, const struct pass *p)
{
#pragma omp parallel num_threads(p->threads)
    {
        const struct worker w = worker(m, p);
        for (int64_t index = 0; index < m->layer_count; index++) {
            const struct linear *layer = &m->layers[index].qkv; /* and out, gate_up, down behind it */
            for (int which = 0; which < 4; which++) {
                int64_t from, to;
                share(layer[which].outputs, PANEL, &w, &from, &to);
                multiply(layer + which, from, to, (struct product){p->x, p->scratch, p->rows, layer[which].inputs, 0, 0});
                BARRIER
            }
        }
        int64_t from, to;
        share(m->head.outputs, PANEL, &w, &from, &to);
        multiply(&m->head, from, to, (struct product){p->x, p->logits, p->outputs, m->hidden, m->head.outputs, 0});
    }
}

/* A window of greedy drafts, all rows of the batch at once. */

struct window {
    int64_t *sequence, *position;   /* [R] the arrays of the pass, which are overwritten: rows and slots, */
    float *cosine, *sine, *joined;  /* angles, and embeddings with states [R, 2 hidden] */
    const float *states;            /* [R, hidden] what the pass taps */
    const float *embedding;         /* [vocabulary, hidden] */
    const float *cosines, *sines;   /* [slots, head_dim], by position */
    const int64_t *token;           /* [head's outputs] the token of each logit */
    const int64_t *limits;          /* [B] tokens asked for, at least 1 in the rows of the pass */
    const int64_t *ends;            /* [B, end_count] tokens that end a row */
    int64_t *tokens, *counts;       /* [B, width], [B] the draft; counts are 0 before */
    double *seconds;                /* [width - 1] of each pass */
    int64_t width, end_count;
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
    const int64_t count = m->head.outputs, width = m->head_dim, hidden = m->hidden;
    for (int64_t passes = 0;; passes++) {
        int64_t kept = 0;
        for (int64_t i = 0; i < p->rows; i++) {
            const float *logits = p->logits + i * count;
            int64_t row = v->sequence[i], best = largest(logits, count), token = v->token[best];
            v->tokens[row * v->width + v->counts[row]++] = token;
            if (!goes_on(v, row, token, logits, count, logits[best]))
                continue;
            int64_t position = v->position[i] + 1;
            memcpy(v->joined + kept * 2 * hidden, v->embedding + token * hidden, sizeof(float) * (size_t)hidden);
            memcpy(v->joined + (kept * 2 + 1) * hidden, v->states + i * hidden, sizeof(float) * (size_t)hidden);
            memcpy(v->cosine + kept * width, v->cosines + position * width, sizeof(float) * (size_t)width);
            memcpy(v->sine + kept * width, v->sines + position * width, sizeof(float) * (size_t)width);
            v->sequence[kept] = row;
            v->position[kept++] = position;
        }
        if (!kept)
            return passes;
        p->rows = p->outputs = kept;
        double began = now();
        forward(m, p);
        v->seconds[passes] = now() - began;
    }
}

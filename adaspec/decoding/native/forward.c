/* One pass of a Llama-like decoder over R rows, on a CPU.

   A row is one position of one sequence. All rows of a pass share each weight that is read, so a pass over a few rows
   takes hardly longer than a pass over one. And a row's result is the same bits whatever rows are beside it, by
   construction: every output is one chain of multiply-adds over the inputs in a fixed order, a row attends to the slots
   up to its own position and sees no other, and threads share out outputs, never a sum. */

#include "linear.h"

#ifdef _OPENMP
#include <omp.h>
#endif

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

/* The products of a query with the keys of eight slots. */
INLINE v8 products_of(const float *query, const float *keys, int64_t width)
{
    v8 products[LANES] = {{0}};
    for (int64_t i = 0; i < width; i += LANES)
#pragma GCC unroll 8
        for (int slot = 0; slot < LANES; slot++)
            products[slot] = multiply_add(load(query + i), load(keys + slot * width + i), products[slot]);
    return sums_of(products);
}

/* Columns of the weighted sum of the values. */
INLINE void weighted(const int parts, const float *weights, const float *values, int64_t slots, int64_t width, float factor,
                     float *y)
{
    v8 sums[8];
#pragma GCC unroll 8
    for (int n = 0; n < parts; n++)
        sums[n] = (v8){0};
    for (int64_t slot = 0; slot < slots; slot++) {
        v8 weight = all(weights[slot]);
#pragma GCC unroll 8
        for (int n = 0; n < parts; n++)
            sums[n] = multiply_add(weight, load(values + slot * width + n * LANES), sums[n]);
    }
    for (int n = 0; n < parts; n++)
        *(v8 *)(y + n * LANES) = sums[n] * factor;
}

static void attend(const float *query, const float *keys, const float *values, int64_t slots, int64_t width, float scale,
                   float *scores, float *y)
{
    const int64_t padded = (slots + LANES - 1) / LANES * LANES; /* at most what the cache holds */
    v8 largest = all(-INFINITY), total = {0};
    for (int64_t slot = 0; slot < padded; slot += LANES)
        *(v8 *)(scores + slot) = products_of(query, keys + slot * width, width) * scale;
    for (int64_t slot = slots; slot < padded; slot++)
        scores[slot] = -INFINITY;
    for (int64_t slot = 0; slot < padded; slot += LANES)
        largest = larger(load(scores + slot), largest);
    const float top = maximum(largest);
    for (int64_t slot = 0; slot < padded; slot += LANES) {
        v8 weight = exponential(load(scores + slot) - top);
        *(v8 *)(scores + slot) = weight;
        total += weight; /* behind the last slot e^-87, which vanishes beside the e^0 of the largest */
    }
    float factor = 1.0f / sum(total);
    int64_t i = 0;
    for (; i + 8 * LANES <= width; i += 8 * LANES)
        weighted(8, scores, values + i, slots, width, factor, y + i);
    for (; i < width; i += LANES)
        weighted(1, scores, values + i, slots, width, factor, y + i);
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
            rotate(at, m->cosines + p->position[row] * width, m->sines + p->position[row] * width, width);
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
    multiply(&l->gate, from, to, product);
    product.y += m->inner;
    multiply(&l->up, from, to, product);
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

static void forget_best(const struct pass *p)
{
    for (int64_t i = 0; i < p->threads * p->outputs; i++)
        p->best[i] = (struct best){-INFINITY, 0};
}

/* The first of the largest of values from .. to: of a block of them first, then in it. */
static struct best best_of(const float *values, int64_t from, int64_t to)
{
    enum { BLOCK = 64 };
    struct best best = {-INFINITY, (int32_t)from};
    int64_t block = from;
    for (int64_t first = from; first + BLOCK <= to; first += BLOCK) {
        v8 most = load(values + first);
        for (int64_t i = LANES; i < BLOCK; i += LANES)
            most = larger(load(values + first + i), most);
        float top = maximum(most);
        if (top > best.value)
            best.value = top, block = first;
    }
    for (int64_t i = from + (to - from) / BLOCK * BLOCK; i < to; i++)
        if (values[i] > best.value)
            best.value = values[i], block = i;
    for (best.index = (int32_t)block; best.index + 1 < to && values[best.index] != best.value;)
        best.index++;
    return best;
}

void find_best(const struct model *m, const struct pass *p)
{
    forget_best(p);
    for (int64_t output = 0; output < p->outputs; output++)
        p->best[output] = best_of(p->logits + output * m->head.outputs, 0, p->considered);
}

int64_t largest(const struct pass *p, int64_t output)
{
    struct best best = p->best[output];
    for (int64_t thread = 1; thread < p->threads; thread++) {
        struct best other = p->best[thread * p->outputs + output];
        best = other.value > best.value ? other : best;
    }
    return best.index;
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
    to = to < p->considered ? to : p->considered;
    for (int64_t output = 0; p->best && from < to && output < p->outputs; output++)
        p->best[w->index * p->outputs + output] = best_of(p->logits + output * m->head.outputs, from, to);
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
    if (p->best)
        forget_best(p);
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
            const struct linear *layer = &m->layers[index].qkv; /* and the others behind it */
            for (int which = 0; which < 5; which++) {
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

/* A decoder and a pass of it. Rows are [R, width] float, caches [B, kv_heads, slots, head_dim]. */

#pragma once

#include <stdint.h>

enum kind { FLOAT32, FLOAT16, INT8, INT4 };

struct linear {
    const void *weight; /* panels, see linear.h, of kind; INT4: blocks [outputs / 8, inputs / 32] */
    const float *scale; /* [outputs], INT8 only */
    const float *bias;  /* [outputs] or NULL */
    int64_t outputs, inputs;
    int32_t kind;
};

struct layer {
    struct linear qkv, out, gate, up, down; /* q, k, v stacked */
    const float *attention_norm, *mlp_norm; /* [hidden] */
    const float *query_norm, *key_norm;     /* [head_dim] or NULL */
    float *keys, *values;                   /* [B, kv_heads, slots, head_dim] */
};

struct model {
    const struct layer *layers;
    const float *final_norm; /* [hidden] */
    struct linear join;      /* what enters the first layer, of wider rows; without a weight: the rows themselves */
    struct linear head;
    int64_t layer_count, hidden, heads, kv_heads, head_dim, inner;
    int64_t slots; /* a multiple of 8 */
    const float *cosines, *sines; /* [slots, head_dim] the angles of positions */
    float epsilon, scale;
};

struct best {
    float value;
    int32_t index;
};

struct pass {
    int64_t rows, outputs;      /* R; how many of them get logits */
    int64_t *sequence;          /* [R] index into the caches' B */
    int64_t *position;          /* [R] slot that the row writes; it attends to 0 .. position */
    int64_t *wanted;            /* [outputs] rows that get logits */
    const float *joined;        /* [R, join.inputs], where there is a join */
    float *x;                   /* [R, hidden]: embeddings (of a join: anything), overwritten */
    float *logits;              /* [outputs, vocabulary] */
    float *const *taps;         /* [layer_count]: where to put the state behind each layer [R, hidden], or NULL; behind
                                   the last one: as the head reads it, after the final norm */
    float *scratch;             /* scratch_size() floats */
    struct best *best;          /* [threads, outputs]: the largest logit among the outputs of each thread, or NULL */
    int64_t considered;         /* logits that count for it, the first ones */
    int64_t threads;
};

/* One pass over R rows. */
void forward(const struct model *m, const struct pass *p);

/* Tells the best of logits that are there. */
void find_best(const struct model *m, const struct pass *p);

/* The first of the largest logits of a row, once the best are told. */
int64_t largest(const struct pass *p, int64_t output);

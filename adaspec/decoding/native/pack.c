/* Packing of int4 weights: the step and the minimum of a group with the least squared error among some. */

#include "int4.h"

struct choice {
    float error, scale, minimum;
};

static float rounded(float value, uint16_t *stored)
{
    _Float16 half = (_Float16)value;
    memcpy(stored, &half, sizeof half);
    return (float)half;
}

/* The codes of eight weights, 0 .. 15. */
INLINE v8 codes_of(const float *weights, float scale, float minimum)
{
    v8 most = (v8){0} + 15.0f;
    v8 code = (load(weights) - minimum) / scale + 12582912.0f - 12582912.0f; /* 1.5 * 2^23: rounds to an integer */
    code = (v8)((i8)code & (code > 0.0f));
    i8 above = code > most;
    return (v8)(((i8)code & ~above) | ((i8)most & above));
}

static void consider(const float *weights, float scale, float minimum, struct choice *best)
{
    uint16_t ignored;
    struct choice tried = {0.0f, rounded(fmaxf(scale, 1e-7f), &ignored), rounded(minimum, &ignored)};
    v8 errors = {0};
    for (int i = 0; i < GROUP; i += LANES) {
        v8 difference = codes_of(weights + i, tried.scale, tried.minimum) * tried.scale + tried.minimum - load(weights + i);
        errors += difference * difference;
    }
    tried.error = sum(errors);
    if (tried.error < best->error)
        *best = tried;
}

/* Steps that reach from the least to the largest weight in 8 to 15 codes, so that weights on such a grid (of a model
   that was in four bits before) are met exactly; and some that cut off both ends. */
static struct choice choose(const float *weights)
{
    float low = weights[0], high = weights[0];
    for (int i = 1; i < GROUP; i++) {
        low = fminf(low, weights[i]);
        high = fmaxf(high, weights[i]);
    }
    struct choice best = {INFINITY, 1.0f, 0.0f};
    for (int codes = 15; codes >= 8; codes--)
        consider(weights, (high - low) / (float)codes, low, &best);
    for (int cut = 1; cut <= 5; cut++) {
        float scale = (high - low) * (1.0f - 0.05f * (float)cut) / 15.0f;
        consider(weights, scale, (low + high) * 0.5f - 7.5f * scale, &best);
    }
    return best;
}

/* Weights [outputs, inputs] -> blocks [outputs / 8, inputs / 32], both padded with zeros. */
void int4_pack(const float *weight, int64_t outputs, int64_t inputs, struct block *blocks)
{
    const int64_t groups = groups_of(inputs);
#pragma omp parallel for
    for (int64_t at = 0; at < (outputs + OUTPUTS - 1) / OUTPUTS * groups; at++) {
        memset(blocks + at, 0, sizeof *blocks);
        for (int64_t n = 0; n < OUTPUTS && at / groups * OUTPUTS + n < outputs; n++) {
            int64_t first = at % groups * GROUP, count = inputs - first < GROUP ? inputs - first : GROUP;
            float weights[GROUP] = {0};
            memcpy(weights, weight + (at / groups * OUTPUTS + n) * inputs + first, sizeof(float) * (size_t)count);
            struct choice best = choose(weights);
            rounded(best.scale, blocks[at].scale + n);
            rounded(best.minimum, blocks[at].minimum + n);
            for (int i = 0; i < GROUP; i++) {
                int code = (int)codes_of(weights + i / LANES * LANES, best.scale, best.minimum)[i % LANES];
                blocks[at].codes[i / STEP / 2][n][i % STEP] |= (uint8_t)(code << i / STEP % 2 * 4);
            }
        }
    }
}

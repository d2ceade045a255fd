/* Grouped int4: 32 weights of an output share a scale and a minimum, w = scale q + minimum with q in 0 .. 15.

   A row is quantised too, by group, to signed bytes with one scale: a sum over a group is an integer, hence exact, and
   the groups of an output are added in order. So here too a row is the same bits whatever is beside it, and on every
   processor. */

#include "lanes.h"

#define GROUP 32
#define STEP 4       /* inputs of one integer product */
#define OUTPUTS 8    /* that a block holds */
#define INT4_ROWS 16 /* rows that are quantised together */

struct block {
    uint8_t codes[GROUP / STEP / 2][OUTPUTS][STEP]; /* low half: an even step of four inputs, high half: the next one */
    uint16_t scale[OUTPUTS], minimum[OUTPUTS];      /* float16 */
};

struct codes {
    const int8_t *codes; /* [groups, GROUP] */
    const float *scales; /* [groups] */
    const float *sums;   /* [groups]: scale times the sum of the codes */
};

INLINE int64_t groups_of(int64_t inputs) { return (inputs + GROUP - 1) / GROUP; }

/* c + each output's product of four unsigned and four signed bytes; `inputs` the same four for all outputs. */
INLINE i8 dot(i8 c, i8 weights, int32_t inputs)
{
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
    return (i8)_mm256_dpbusd_epi32((__m256i)c, (__m256i)weights, _mm256_set1_epi32(inputs));
#elif defined(__AVX2__)
    __m256i pairs = _mm256_maddubs_epi16((__m256i)weights, _mm256_set1_epi32(inputs)); /* below 2 * 15 * 127 */
    return c + (i8)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#else
    for (int output = 0; output < OUTPUTS; output++)
        for (int i = 0; i < STEP; i++)
            c[output] += (uint8_t)(weights[output] >> 8 * i) * (int8_t)(inputs >> 8 * i);
    return c;
#endif
}

INLINE int32_t four(const int8_t *from)
{
    int32_t value;
    memcpy(&value, from, sizeof value);
    return value;
}

/* Y of some rows by the outputs of a column of blocks. */
INLINE void int4_tile(const int rows, const struct block *blocks, int64_t groups, const struct codes *x, v8 *sums)
{
#pragma GCC unroll 4
    for (int m = 0; m < rows; m++)
        sums[m] = (v8){0};
    for (int64_t group = 0; group < groups; group++) {
        const struct block *block = blocks + group;
        __builtin_prefetch((const char *)block + AHEAD / 2);
        __builtin_prefetch((const char *)block + AHEAD / 2 + 64);
        __builtin_prefetch((const char *)block + AHEAD / 2 + 128);
        i8 products[4];
#pragma GCC unroll 4
        for (int m = 0; m < rows; m++)
            products[m] = (i8){0};
#pragma GCC unroll 4
        for (int pair = 0; pair < GROUP / STEP / 2; pair++) {
            i8 both = *(const i8 *)block->codes[pair], low = both & 0x0f0f0f0f, high = both >> 4 & 0x0f0f0f0f;
#pragma GCC unroll 4
            for (int m = 0; m < rows; m++) {
                const int8_t *codes = x[m].codes + group * GROUP + pair * 2 * STEP;
                products[m] = dot(products[m], low, four(codes));
                products[m] = dot(products[m], high, four(codes + STEP));
            }
        }
        v8 scale = widen_half(block->scale), minimum = widen_half(block->minimum);
#pragma GCC unroll 4
        for (int m = 0; m < rows; m++) {
            v8 scaled = scale * x[m].scales[group], sum = (v8){0} + x[m].sums[group];
            sums[m] = multiply_add(scaled, __builtin_convertvector(products[m], v8), sums[m]);
            sums[m] = multiply_add(minimum, sum, sums[m]);
        }
    }
}

/* A row in groups of signed bytes, its end filled up with zeros. */
INLINE void int4_codes(const float *x, int64_t inputs, int8_t *codes, float *scales, float *sums)
{
    for (int64_t first = 0, group = 0; first < inputs; first += GROUP, group++) {
        int64_t count = inputs - first < GROUP ? inputs - first : GROUP;
        float most = 1e-30f;
        for (int64_t i = 0; i < count; i++)
            most = fmaxf(most, fabsf(x[first + i]));
        float factor = 127.0f / most;
        int32_t sum = 0;
        memset(codes + first, 0, GROUP);
        for (int64_t i = 0; i < count; i++) {
            float code = x[first + i] * factor + 12582912.0f - 12582912.0f; /* 1.5 * 2^23: rounds to an integer */
            codes[first + i] = (int8_t)code;
            sum += (int32_t)code;
        }
        scales[group] = most / 127.0f;
        sums[group] = scales[group] * (float)sum;
    }
}

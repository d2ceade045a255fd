/* Arithmetic on eight numbers at once. */

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX2__) && defined(__F16C__)
#include <immintrin.h>
#endif

typedef float v8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t i8 __attribute__((vector_size(32), aligned(4), may_alias));
#define INLINE static inline __attribute__((always_inline))
#define LANES 8
#define AHEAD 8192 /* bytes of weights that are asked of the memory before they are used, over all streams */

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

/* a * b + c, rounded once where the processor can; the compiler itself must not choose (-ffp-contract=off). */
INLINE v8 multiply_add(v8 a, v8 b, v8 c)
{
#if defined(__FMA__)
    return (v8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

INLINE v8 all(float value) { return (v8){value, value, value, value, value, value, value, value}; }

INLINE v8 larger(v8 a, v8 b)
{
    i8 above = a > b;
    return (v8)(((i8)a & above) | ((i8)b & ~above));
}

INLINE float sum(v8 v) { return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7])); }

INLINE float maximum(v8 v)
{
    float most = v[0];
    for (int lane = 1; lane < LANES; lane++)
        most = v[lane] > most ? v[lane] : most;
    return most;
}

/* The sum of each of eight vectors, all in one order. */
INLINE v8 sums_of(const v8 *v)
{
#if defined(__AVX2__)
    __m256 a = _mm256_hadd_ps((__m256)v[0], (__m256)v[1]), b = _mm256_hadd_ps((__m256)v[2], (__m256)v[3]);
    __m256 c = _mm256_hadd_ps((__m256)v[4], (__m256)v[5]), d = _mm256_hadd_ps((__m256)v[6], (__m256)v[7]);
    a = _mm256_hadd_ps(a, b);
    c = _mm256_hadd_ps(c, d);
    return (v8)_mm256_add_ps(_mm256_permute2f128_ps(a, c, 0x20), _mm256_permute2f128_ps(a, c, 0x31));
#else
    return (v8){sum(v[0]), sum(v[1]), sum(v[2]), sum(v[3]), sum(v[4]), sum(v[5]), sum(v[6]), sum(v[7])};
#endif
}

/* e^x, to 2e-7 of the result, for x within -87 .. 88 and of the nearer end for others: x = n ln 2 + r, then a polynomial
   for e^r (Cephes). */
INLINE v8 exponential(v8 x)
{
    x = -larger(-larger(x, all(-87.0f)), all(-88.0f));
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

/* Which variant of the kernels this processor can run, and the version of their interface.

   A variant for x86-64 is compiled for a level of the x86-64 psABI (v1, v3 or v4), or for v4 and one feature more, and
   the compiler may use every instruction of that level. So every feature of the level is tested, not only the vectors.
   The operating system has to save the registers of the vectors too; XCR0 tells which ones it saves.

   Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2 (CPUID) and volume 1, section 13.3;
   levels: https://gitlab.com/x86-psABIs/x86-64-ABI, section 3.1.1. */
#include "regard.h"

EXPORT int regard_version(void) { return INTERFACE_VERSION; }

#if defined(__x86_64__)

typedef struct {
    unsigned eax, ebx, ecx, edx;
} Registers;

static Registers cpuid(unsigned leaf, unsigned subleaf) {
    Registers r;
    __asm__ volatile("cpuid" : "=a"(r.eax), "=b"(r.ebx), "=c"(r.ecx), "=d"(r.edx) : "a"(leaf), "c"(subleaf));
    return r;
}

/* The registers that the operating system saves, one bit a kind. */
static unsigned saved_registers(void) {
    unsigned low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

static int has(unsigned value, unsigned bits) { return (value & bits) == bits; }

#define BIT(n) (1u << (n))

/* Leaf 1, ecx: SSE3, SSSE3, FMA, CMPXCHG16B, SSE4.1, SSE4.2, MOVBE, POPCNT, OSXSAVE, AVX, F16C. */
#define LEAF_1 \
    (BIT(0) | BIT(9) | BIT(12) | BIT(13) | BIT(19) | BIT(20) | BIT(22) | BIT(23) | BIT(27) | BIT(28) | BIT(29))
/* Leaf 7, ebx: BMI1, AVX2, BMI2. */
#define LEAF_7_AVX2 (BIT(3) | BIT(5) | BIT(8))
/* Leaf 7, ebx: AVX-512 F, DQ, CD, BW, VL. */
#define LEAF_7_AVX512 (BIT(16) | BIT(17) | BIT(28) | BIT(30) | BIT(31))
/* Leaf 7, second part, eax: AVX-512 BF16. */
#define LEAF_7_BFLOAT16 BIT(5)
/* Leaf 0x80000001, ecx: LAHF, LZCNT. */
#define EXTENDED_1 (BIT(0) | BIT(5))
/* XCR0: XMM, YMM. */
#define SAVED_AVX (BIT(1) | BIT(2))
/* XCR0: mask registers, upper halves of ZMM0 to 15, ZMM16 to 31. */
#define SAVED_AVX512 (BIT(5) | BIT(6) | BIT(7))

/* 0: any x86-64 processor. 1: AVX2 and FMA (x86-64-v3). 2: AVX-512 F, VL, DQ, BW (x86-64-v4). 3: AVX-512 BF16 too. */
EXPORT int regard_level(void) {
    if (cpuid(0, 0).eax < 7 || cpuid(0x80000000u, 0).eax < 0x80000001u) return 0;
    if (!has(cpuid(1, 0).ecx, LEAF_1) || !has(cpuid(0x80000001u, 0).ecx, EXTENDED_1)) return 0;
    const unsigned saved = saved_registers(), features = cpuid(7, 0).ebx;
    if (!has(saved, SAVED_AVX) || !has(features, LEAF_7_AVX2)) return 0;
    if (!has(saved, SAVED_AVX512) || !has(features, LEAF_7_AVX512)) return 1;
    return cpuid(7, 0).eax >= 1 && has(cpuid(7, 1).eax, LEAF_7_BFLOAT16) ? 3 : 2;
}

#else

/* Every AArch64 processor has NEON, which the baseline uses. */
EXPORT int regard_level(void) { return 0; }

#endif

#if defined(_WIN32)
/* Called when the library is loaded. There is nothing to prepare. */
int DllMainCRTStartup(void *library, unsigned reason, void *reserved) {
    (void)library, (void)reason, (void)reserved;
    return 1;
}
#endif

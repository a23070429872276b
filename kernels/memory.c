/* Functions that a compiler calls on its own, for example to clear an array. The library has no C library; a program
   that has one (the harness under a sanitizer) has them already. */
#if !__STDC_HOSTED__
typedef __SIZE_TYPE__ size_t;

void *memset(void *to, int value, size_t num_bytes) {
    unsigned char *bytes = to;
    for (size_t n = 0; n < num_bytes; n++) bytes[n] = (unsigned char)value;
    return to;
}

void *memcpy(void *restrict to, const void *restrict from, size_t num_bytes) {
    unsigned char *copy = to;
    const unsigned char *bytes = from;
    for (size_t n = 0; n < num_bytes; n++) copy[n] = bytes[n];
    return to;
}
#endif

#if defined(_WIN32) && defined(__x86_64__)
/* On Windows a stack grows page by page: a function with more than a page of variables first touches every page that it
   will use. The compiler calls this with the number of bytes in rax, and expects every register unchanged. */
__asm__(".globl ___chkstk_ms\n"
        "___chkstk_ms:\n"
        "    pushq %rcx\n"
        "    pushq %rax\n"
        "    leaq 24(%rsp), %rcx\n" /* the caller's stack pointer */
        "1:  cmpq $4096, %rax\n"
        "    jb 2f\n"
        "    subq $4096, %rcx\n"
        "    testq %rcx, (%rcx)\n"
        "    subq $4096, %rax\n"
        "    jmp 1b\n"
        "2:  subq %rax, %rcx\n"
        "    testq %rcx, (%rcx)\n"
        "    popq %rax\n"
        "    popq %rcx\n"
        "    ret\n");
#endif

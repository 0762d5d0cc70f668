// glibc 2.32 and 2.34 moved these from libpthread into libc, under a new version each; the old one stays there, and every
// Python has it. Without a version of its own a library would ask for the newest.
#pragma once
#if defined(__x86_64__)
#define OLDEST "GLIBC_2.2.5"
#elif defined(__aarch64__)
#define OLDEST "GLIBC_2.17"
#endif
#ifdef OLDEST
#define OLD(name) __asm__(".symver " #name ", " #name "@" OLDEST)
OLD(pthread_attr_setstacksize);
OLD(pthread_create);
OLD(pthread_getspecific);
OLD(pthread_key_create);
OLD(pthread_mutex_trylock);
OLD(pthread_once);
OLD(pthread_setspecific);
OLD(pthread_sigmask);
#undef OLD
#undef OLDEST
#endif

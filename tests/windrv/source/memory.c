/* Memory: the functions that compilers call implicitly, the heap, random numbers. */
#include "machine.h"

/* The heap is above the image, and fits into a machine of 256 MiB. */
enum { HEAP_START = 16 << 20, HEAP_END = 240 << 20, HEAP_LENGTH = HEAP_END - HEAP_START };
static u64 heap = HEAP_START, heap_end = HEAP_END;
static int heap_lock;
/* Of each processor, so that the sequence of one does not depend on the others. */
static u64 random_states[PROCESSORS];

void *memcpy(void *to, const void *from, size_t length)
{
    void *start = to;
    __asm__ volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(length)::"memory");
    return start;
}

void *memset(void *to, int value, size_t length)
{
    void *start = to;
    __asm__ volatile("rep stosb" : "+D"(to), "+c"(length) : "a"(value) : "memory");
    return start;
}

void *memmove(void *to, const void *from, size_t length)
{
    u8 *target = to;
    const u8 *source = from;
    if (target <= source || target >= source + length)
        return memcpy(to, from, length);
    while (length--)
        target[length] = source[length];
    return to;
}

int memcmp(const void *left, const void *right, size_t length)
{
    const u8 *a = left, *b = right;
    for (; length--; a++, b++)
        if (*a != *b)
            return *a - *b;
    return 0;
}

size_t strlen(const char *text)
{
    size_t length = 0;
    while (text[length])
        length++;
    return length;
}

size_t wcslen(const wchar_t *text)
{
    size_t length = 0;
    while (text[length])
        length++;
    return length;
}

/* Rings and data of all drivers are then above 4 GiB. */
void heap_above_4_gib(void)
{
    u64 start, length;
    for (u32 i = 0; machine_memory(i, &start, &length); i++)
        if (start >> 32 && length >= HEAP_LENGTH) {
            heap = (u64)map_memory(start, HEAP_LENGTH);
            heap_end = heap + HEAP_LENGTH;
            return;
        }
    print("fail memory: there is none above 4 GiB\n");
    machine_end();
}

/* Returns zeroed memory from a mark that only moves up; `release_to` moves it back after a run. */
void *allocate(u64 length, u64 alignment)
{
    spin_lock(&heap_lock);
    heap = (heap + alignment - 1) & ~(alignment - 1);
    void *start = (void *)heap;
    heap += length;
    spin_unlock(&heap_lock);
    if (heap > heap_end) {
        print("fail memory: the heap ends at %llu MiB\n", heap_end >> 20);
        machine_end();
    }
    memset(start, 0, length);
    return start;
}

u64 allocated(void)
{
    return heap;
}

void release_to(u64 mark)
{
    heap = mark;
}

void seed_random(u64 seed)
{
    for (u32 i = 0; i < PROCESSORS; i++)
        random_states[i] = (seed + i) * 2862933555777941757ull + 3037000493ull;
}

/* A linear congruential generator with the constants of MMIX: a seed determines the run. */
u32 random_number(void)
{
    u64 *state = &random_states[this_processor()];
    *state = *state * 6364136223846793005ull + 1442695040888963407ull;
    return *state >> 33;
}

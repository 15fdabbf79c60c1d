/* The kernel's pool, common buffers, MDLs. */
#include "kmdf.h"

#pragma GCC diagnostic ignored "-Wattributes"

/* Blocks of powers of two. Each class has a queue of free blocks, of which the oldest is reused. */
enum { SMALLEST = 5, CLASSES = 20, IN_USE = 0x75736564, FREED = 0x66726565, PATTERN = 0xdd };
enum { KEPT = 16 };
typedef struct Block {
    u32 state, class;
    u8 *memory;
    struct Block *next;
} Block;
static struct {
    Block *first, *last;
    u32 count;
} freed[CLASSES];
static u32 in_use, damaged;
static int pool_lock;

/* The header is in front of the memory, in a place of its own if the alignment is large. */
static Block *block_new(u32 class, u64 alignment)
{
    Block *block = allocate(sizeof *block, 16);
    u64 space = alignment < 64 ? 64 : alignment;
    u8 *start = allocate(space + (1ull << class), space);
    block->class = class;
    block->memory = start + space;
    *(Block **)(block->memory - sizeof block) = block;
    return block;
}

static Block *block_of(void *memory)
{
    return *(Block **)((u8 *)memory - sizeof(Block *));
}

static int is_damaged(const Block *block)
{
    for (u64 i = 0; i < 1ull << block->class; i++)
        if (block->memory[i] != PATTERN) {
            print("# pool: byte %llu of a freed block of %u is %02x\n", i, 1u << block->class,
                  block->memory[i]);
            return 1;
        }
    return 0;
}

void *pool_allocate(u64 length, u64 alignment)
{
    u32 class = alignment >= PAGE_SIZE ? 12 : SMALLEST;
    while (1ull << class < length)
        class ++;
    Block *block = NULL;
    /* All blocks of at least a page are aligned to pages. */
    spin_lock(&pool_lock);
    if (freed[class].count > KEPT) {
        block = freed[class].first;
        freed[class].first = block->next;
        freed[class].count--;
        damaged += is_damaged(block);
    }
    spin_unlock(&pool_lock);
    if (!block)
        block = block_new(class, class >= 12 ? PAGE_SIZE : 64);
    block->state = IN_USE;
    COUNT(in_use);
    memset(block->memory, PATTERN ^ 0xff, 1ull << class);
    return block->memory;
}

void pool_free(void *memory)
{
    Block *block = block_of(memory);
    if (block->state != IN_USE || block->memory != memory) {
        print("fail pool: %p is freed, but is not in use\n", memory);
        machine_end();
    }
    memset(memory, PATTERN, 1ull << block->class);
    block->state = FREED;
    block->next = NULL;
    spin_lock(&pool_lock);
    if (freed[block->class].count++)
        freed[block->class].last->next = block;
    else
        freed[block->class].first = block;
    freed[block->class].last = block;
    spin_unlock(&pool_lock);
    __atomic_fetch_sub(&in_use, 1, __ATOMIC_RELAXED);
}

u32 pool_blocks(void)
{
    return in_use;
}

u32 pool_damaged(void)
{
    u32 found = damaged;
    for (u32 class = 0; class < CLASSES; class ++)
        for (Block *it = freed[class].first; it; it = it->next)
            found += is_damaged(it);
    return found;
}

PVOID ExAllocatePoolWithTag(POOL_TYPE, SIZE_T length, ULONG)
{
    level_at_most(DISPATCH_LEVEL, "ExAllocatePool");
    return pool_allocate(length, 16);
}

VOID ExFreePoolWithTag(PVOID memory, ULONG)
{
    level_at_most(DISPATCH_LEVEL, "ExFreePool");
    pool_free(memory);
}

VOID ExFreePool(PVOID memory)
{
    pool_free(memory);
}

/* A lookaside list keeps nothing: its inline functions fall back to these. */

static PVOID lookaside_allocate(POOL_TYPE type, SIZE_T length, ULONG tag)
{
    return ExAllocatePoolWithTag(type, length, tag);
}

VOID ExInitializeNPagedLookasideList(PNPAGED_LOOKASIDE_LIST list, PALLOCATE_FUNCTION,
                                     PFREE_FUNCTION, ULONG, SIZE_T size, ULONG tag, USHORT)
{
    memset(list, 0, sizeof *list);
    list->L.Size = size;
    list->L.Tag = tag;
    list->L.Allocate = lookaside_allocate;
    list->L.Free = ExFreePool;
}

VOID ExDeleteNPagedLookasideList(PNPAGED_LOOKASIDE_LIST)
{
}

static PSLIST_ENTRY pop(PSLIST_HEADER)
{
    return NULL;
}

static PSLIST_ENTRY push(PSLIST_HEADER, PSLIST_ENTRY entry)
{
    pool_free(entry);
    return NULL;
}

static USHORT depth(PSLIST_HEADER)
{
    return 0;
}

#define IMPORT(name) void *__imp_##name = (void *)name
IMPORT(ExAllocatePoolWithTag);
IMPORT(ExFreePoolWithTag);
IMPORT(ExFreePool);
IMPORT(ExInitializeNPagedLookasideList);
IMPORT(ExDeleteNPagedLookasideList);
void *__imp_ExpInterlockedPopEntrySList = (void *)pop;
void *__imp_ExpInterlockedPushEntrySList = (void *)push;
void *__imp_ExQueryDepthSList = (void *)depth;

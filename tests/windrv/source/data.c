/* Data: the expected contents of blocks, and the scattered pages of transfers. */
#include "disk.h"

/* Pages are filled with GUARD before a transfer. Up to GUARD_BYTES beside a piece are checked. */
enum { GUARD = 0xee, GUARD_BYTES = 32 };

u64 data_seed;
struct Wrong wrong;
static void *pages[PAGES];
static u32 free_pages;
static int pages_lock;

static u64 mix(u64 x)
{
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return x ^ x >> 31;
}

static u64 first_word(u64 block, u32 generation)
{
    if (generation == ORIGINAL)
        return block * disk.block;
    if (generation == FINAL)
        return ~(block * disk.block);
    return mix(data_seed ^ mix(block << 32 | generation));
}

static u64 next_word(u64 word, u32 generation)
{
    if (generation == ORIGINAL)
        return word + 8;
    if (generation == FINAL)
        return word - 8;
    return word * 6364136223846793005ull + 1442695040888963407ull;
}

void pages_start(void)
{
    u8 *memory = allocate((u64)PAGES * PAGE, PAGE);
    for (free_pages = 0; free_pages < PAGES; free_pages++)
        pages[free_pages] = memory + (u64)free_pages * PAGE;
}

/* Returns pages in random order, so that transfers are scattered. */
static u8 *page_take(void)
{
    u32 random = random_number();
    spin_lock(&pages_lock);
    if (!free_pages) {
        print("fail memory: no pages are left\n");
        machine_end();
    }
    u32 at = random % free_pages;
    u8 *page = pages[at];
    pages[at] = pages[--free_pages];
    spin_unlock(&pages_lock);
    return page;
}

void pieces_free(Request *request)
{
    STOR_SCATTER_GATHER_LIST *list = request->list;
    spin_lock(&pages_lock);
    for (u32 i = 0; i < list->NumberOfElements; i++)
        pages[free_pages++] = (void *)(list->List[i].PhysicalAddress.QuadPart & -(u64)PAGE);
    spin_unlock(&pages_lock);
    list->NumberOfElements = 0;
}

/* The length of the next of `rest` small pieces that share `left` bytes: random, near the average,
 * at least 4 bytes and at most a page. */
static u32 small_piece(u32 left, u32 rest)
{
    if (rest <= 1)
        return left < PAGE ? left : PAGE;
    u32 share = left / rest & ~3u;
    u32 piece = share + (random_number() % (share / 2 + 4) & ~3u);
    if (piece < 4)
        piece = 4;
    return piece < PAGE ? piece : PAGE;
}

/* Makes the scatter/gather list of a request. Offsets are multiples of 4: the alignment that the
 * drivers ask for. */
void pieces_make(Request *request, Shape shape, u32 max_pieces)
{
    STOR_SCATTER_GATHER_LIST *list = request->list;
    u32 count = 0, left = request->blocks * disk.block;
    while (left) {
        u32 offset = 0, piece = PAGE;
        if (shape == SHIFTED && !count) {
            offset = random_number() % 1023 * 4 + 4;
            piece = PAGE - offset;
        } else if (shape == SMALL) {
            piece = small_piece(left, max_pieces - count);
            offset = random_number() % ((PAGE - piece) / 4 + 1) * 4;
        }
        if (piece > left)
            piece = left;
        u8 *page = page_take();
        memset(page, GUARD, PAGE);
        list->List[count].PhysicalAddress.QuadPart = (LONGLONG)(page + offset);
        list->List[count].Length = piece;
        left -= piece;
        count++;
    }
    list->NumberOfElements = count;
}

/* Walks through the words of a list; a piece may end within 8 bytes. */
typedef struct {
    STOR_SCATTER_GATHER_LIST *list;
    u32 piece, at;
} Cursor;

static u32 *cursor_next(Cursor *it)
{
    if (it->at == it->list->List[it->piece].Length) {
        it->piece++;
        it->at = 0;
    }
    u32 *word = (u32 *)(it->list->List[it->piece].PhysicalAddress.QuadPart + it->at);
    it->at += 4;
    return word;
}

void fill(Request *request)
{
    Cursor cursor = {request->list, 0, 0};
    for (u32 i = 0; i < request->blocks; i++) {
        u64 word = first_word(request->block + i, request->generation);
        for (u32 at = 0; at < disk.block; at += 8) {
            *cursor_next(&cursor) = word;
            *cursor_next(&cursor) = word >> 32;
            word = next_word(word, request->generation);
        }
    }
}

/* Whether the next block of the list has the expected content, or zeros if it was unmapped. */
static int block_is_right(Cursor *cursor, u64 block)
{
    u32 generation = block < disk.region ? disk.generation[block] : ORIGINAL;
    u64 word = first_word(block, generation);
    int same = 1, zero = 1;
    for (u32 at = 0; at < disk.block; at += 8) {
        u32 low = *cursor_next(cursor), high = *cursor_next(cursor);
        same &= low == (u32)word && high == (u32)(word >> 32);
        zero &= !low && !high;
        word = next_word(word, generation);
    }
    return generation == UNKNOWN || same || (zero && block < disk.region && disk.zeroed[block]);
}

/* Whether the bytes beside a piece are unchanged. */
static int guards_are_whole(STOR_SCATTER_GATHER_ELEMENT *piece)
{
    u64 from = piece->PhysicalAddress.QuadPart, to = from + piece->Length;
    u64 page = from & -(u64)PAGE;
    int whole = 1;
    for (u64 at = from - page > GUARD_BYTES ? from - GUARD_BYTES : page; at < from; at++)
        whole &= *(u8 *)at == GUARD;
    for (u64 at = to; at < page + PAGE && at < to + GUARD_BYTES; at++)
        whole &= *(u8 *)at == GUARD;
    return whole;
}

void verify(Request *request)
{
    Cursor cursor = {request->list, 0, 0};
    for (u32 i = 0; i < request->blocks; i++)
        if (!block_is_right(&cursor, request->block + i) && !COUNT(wrong.blocks))
            wrong.first = request->block + i;
    for (u32 i = 0; i < request->list->NumberOfElements; i++)
        if (!guards_are_whole(&request->list->List[i]))
            COUNT(wrong.stray_pages);
}

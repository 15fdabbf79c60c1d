/* The memory map, the end of the boot services, and the move of runtime
 * services to other addresses. */
#include "loader.h"

static const struct guid LOADED_IMAGE = {
  0x5b1b31a1, 0x9562, 0x11d2, {0x8e, 0x3f, 0x00, 0xa0, 0xc9, 0x69, 0x72, 0x3b}
};
static const struct guid ATTRIBUTES_TABLE = {
  0xdcfa911d, 0x26eb, 0x469f, {0xa2, 0x20, 0x38, 0xb7, 0xdc, 0x46, 0x12, 0x20}
};

enum { MAP = 128 << 10, TABLES = 128, ENTRIES = 512, STACK = 64 << 10, PAIRS = 64 };
enum { PRESENT = 1, WRITABLE = 2, WRITE_THROUGH = 8, NO_CACHE = 16 };
#define NO_EXECUTE (1ull << 63)
#define FRAME 0x000ffffffffff000ull
#define CR4_LA57 (1ull << 12)
/* The image, and the first region of runtime services; the others are below it. */
#define HIGH_IMAGE 0xfffff78000000000ull
#define HIGH_RUNTIME 0xfffff90000000000ull
#define REGION (2ull << 20)

static byte map[MAP], moved[MAP];
static word map_size, map_key, descriptor_size;
static dword descriptor_version;
static word page_tables[TABLES][ENTRIES] __attribute__((aligned(PAGE)));
static word page_tables_used;
static byte stack[STACK] __attribute__((aligned(64)));

static struct descriptor *at(byte *of, word number)
{
  return (struct descriptor *)(of + number * descriptor_size);
}

static word count(void)
{
  return map_size / descriptor_size;
}

static void get_map(void)
{
  map_size = sizeof map;
  word status = BOOT(GET_MEMORY_MAP, &map_size, map, &map_key, &descriptor_size,
    &descriptor_version);
  if (status != 0 || descriptor_size < sizeof(struct descriptor)) {
    say("wrong: GetMemoryMap: %e, descriptors of %d bytes\n", status, descriptor_size);
    halt();
  }
}

static int is_ram(dword type)
{
  return (type >= 1 && type <= 7) || type == 9 || type == 10;
}

/* A fact for each pair of type and attributes. */
static void kinds(void)
{
  static struct { word type, attributes; } pairs[PAIRS];
  word used = 0, known;
  for (word i = 0; i < count(); i++) {
    struct descriptor *one = at(map, i);
    for (known = 0; known < used; known++)
      if (pairs[known].type == one->type && pairs[known].attributes == one->attributes)
        break;
    if (known < used || used == PAIRS)
      continue;
    pairs[used].type = one->type;
    pairs[used++].attributes = one->attributes;
    say("fact memory of type %d with attributes %x: there\n", (word)one->type, one->attributes);
  }
}

static void check(struct descriptor *one)
{
  int runtime_type = one->type == RUNTIME_CODE || one->type == RUNTIME_DATA;
  if (one->type >= MEMORY_TYPES || one->pages == 0 || one->physical % PAGE != 0)
    say("wrong: memory at %x: type %d, %d pages\n", one->physical, (word)one->type, one->pages);
  if (runtime_type && !(one->attributes & MEMORY_RUNTIME))
    say("wrong: memory at %x: a runtime type without the attribute\n", one->physical);
  if ((one->attributes & MEMORY_RUNTIME) && is_ram(one->type) && !runtime_type)
    say("wrong: memory at %x: a runtime attribute, type %d\n", one->physical, (word)one->type);
  for (word i = 0; i < count(); i++) {
    struct descriptor *other = at(map, i);
    if (other != one && one->physical < other->physical + other->pages * PAGE
        && other->physical < one->physical + one->pages * PAGE)
      say("wrong: memory at %x and %x overlaps\n", one->physical, other->physical);
  }
}

/* The runtime region that contains a range, or 0. */
static struct descriptor *region(word start, word length)
{
  for (word i = 0; i < count(); i++) {
    struct descriptor *one = at(map, i);
    if ((one->attributes & MEMORY_RUNTIME) && start >= one->physical
        && start + length <= one->physical + one->pages * PAGE)
      return one;
  }
  return 0;
}

/* UEFI 2.10, 4.6.4: each part is in a runtime region and cannot be both written and executed. */
static void attributes_table(void)
{
  enum { HEADER = 16, READ_ONLY = 1 << 17, EXECUTE_PROTECT = 1 << 14 };
  const byte *found = 0;
  for (word i = 0; i < table->configurations; i++)
    if (same(&ATTRIBUTES_TABLE, &table->configuration[i].guid, sizeof ATTRIBUTES_TABLE))
      found = table->configuration[i].table;
  say("fact memory attributes table: %s\n", found ? "there" : "none");
  for (word i = 0; found && i < get32(found + 4); i++) {
    struct descriptor *one = (struct descriptor *)(found + HEADER + i * get32(found + 8));
    if (region(one->physical, one->pages * PAGE) == 0)
      say("wrong: memory attributes table: %x is in no runtime region\n", one->physical);
    if (!(one->attributes & (READ_ONLY | EXECUTE_PROTECT)))
      say("wrong: memory attributes table: %x can be written and executed\n", one->physical);
  }
}

void memory(void)
{
  word ram = 0, runtime_regions = 0;
  get_map();
  say("fact memory map: version %d, descriptors of %d bytes\n", (word)descriptor_version,
    descriptor_size);
  kinds();
  for (word i = 0; i < count(); i++) {
    struct descriptor *one = at(map, i);
    check(one);
    ram += is_ram(one->type) ? one->pages : 0;
    runtime_regions += (one->attributes & MEMORY_RUNTIME) != 0;
  }
  say("fact memory in all: %d MiB\n", (ram * PAGE + (1 << 19)) >> 20);
  say("note %d ranges, %d of the runtime\n", count(), runtime_regions);
  attributes_table();
}

static word *entry(word *level, word address, int shift)
{
  word *found = &level[address >> shift & (ENTRIES - 1)];
  if (!(*found & PRESENT)) {
    if (page_tables_used == TABLES) {
      say("wrong: too many page tables are needed\n");
      halt();
    }
    *found = (word)page_tables[page_tables_used++] | PRESENT | WRITABLE;
  }
  return (word *)(*found & FRAME);
}

static void map_pages(word virtual, word physical, word pages, word flags)
{
  for (word i = 0; i < pages; i++, virtual += PAGE, physical += PAGE) {
    word *level = entry(page_tables[0], virtual, 39);
    level = entry(entry(level, virtual, 30), virtual, 21);
    level[virtual >> 12 & (ENTRIES - 1)] = physical | flags | PRESENT | WRITABLE;
  }
}

/* Each region of the runtime gets an address of its own, in reverse order. */
static word move_regions(void)
{
  word used = 0, next = HIGH_RUNTIME;
  for (word i = 0; i < count(); i++) {
    struct descriptor *one = at(map, i), *copy = at(moved, used);
    word flags = one->type == RUNTIME_CODE ? 0 : NO_EXECUTE;
    if (!(one->attributes & MEMORY_RUNTIME))
      continue;
    if (one->type == MAPPED_IO)
      flags |= NO_CACHE | WRITE_THROUGH;
    next -= (one->pages * PAGE + 2 * REGION - 1) / REGION * REGION;
    one->virtual = next;
    for (word j = 0; j < descriptor_size; j++)
      ((byte *)copy)[j] = ((byte *)one)[j];
    map_pages(next, one->physical, one->pages, flags);
    used++;
  }
  return used;
}

static void (*after)(void);
static word low_start;

/* Runs at the high address: forgets the low one. */
static void arrive(void)
{
  page_tables[0][low_start >> 39 & (ENTRIES - 1)] = 0;
  /* Without global pages (CR4.PGE), this forgets all translations. */
  asm volatile("mov %%cr4, %%rax\n"
      "and $~0x80, %%rax\n"
      "mov %%rax, %%cr4\n"
      "mov %%cr3, %%rax\n"
      "mov %%rax, %%cr3\n" ::: "rax", "memory");
  after();
  halt();
}

static void __attribute__((noreturn)) jump(word offset)
{
  word top = (word)stack + sizeof stack - 72 + offset;
  asm volatile("mov $0xc0000080, %%ecx\n"
      "rdmsr\n"
      "or $0x800, %%eax\n"
      "wrmsr\n"
      "mov %0, %%cr3\n"
      "mov %1, %%rsp\n"
      "jmp *%2\n" :: "r"(page_tables[0]), "r"(top), "r"((word)arrive + offset)
      : "rax", "rcx", "rdx", "memory");
  __builtin_unreachable();
}

/* The map changes with nearly every call, so that its key is used at once. */
static void exit_boot_services(void *image)
{
  word status;
  get_map();
  status = BOOT(EXIT_BOOT_SERVICES, image, map_key + 1);
  say("fact exit of boot services with another key: %e\n", status);
  get_map();
  status = BOOT(EXIT_BOOT_SERVICES, image, map_key);
  asm volatile("cli");
  say("fact exit of boot services: %e\n", status);
}

/* Ends the boot services, moves the runtime and this image to high addresses, and goes on there
 * with `then`. The old addresses are not mapped any more. */
void leave_boot_services(void *image, void (*then)(void))
{
  struct loaded_image *loaded;
  word status = BOOT(HANDLE_PROTOCOL, image, &LOADED_IMAGE, &loaded), used, cr4, offset;
  struct descriptor *services;
  asm volatile("mov %%cr4, %0" : "=r"(cr4));
  if (status != 0 || (cr4 & CR4_LA57)) {
    say("wrong: no image, or page tables of five levels\n");
    halt();
  }
  exit_boot_services(image);
  page_tables_used = 1;
  low_start = (word)loaded->base;
  offset = HIGH_IMAGE - low_start;
  map_pages(low_start, low_start, (loaded->size + PAGE - 1) / PAGE, 0);
  map_pages(HIGH_IMAGE, low_start, (loaded->size + PAGE - 1) / PAGE, 0);
  used = move_regions();
  status = RUNTIME(SET_VIRTUAL_ADDRESS_MAP, used * descriptor_size, descriptor_size,
    (word)descriptor_version, moved);
  say("fact move of the address map: %e\n", status);
  services = region((word)runtime, sizeof *runtime);
  if (services == 0) {
    say("wrong: the runtime services are in no region of the runtime\n");
    halt();
  }
  runtime = (void *)((word)runtime - services->physical + services->virtual);
  after = (void (*)(void))((word)then + offset);
  jump(offset);
}

/* A file of 5 GiB on CDs, read through the firmware's own UDF driver. */
#include "loader.h"

static const struct guid FILE_SYSTEM = {
  0x964e5b22, 0x6459, 0x11d2, {0x8e, 0x39, 0x00, 0xa0, 0xc9, 0x69, 0x72, 0x3b}
};
static const struct guid DEVICE_PATH = {
  0x09576e91, 0x6d3f, 0x11d2, {0x8e, 0x39, 0x00, 0xa0, 0xc9, 0x69, 0x72, 0x3b}
};

/* UEFI 2.10, 13.4 and 13.5 */
struct file_system {
  word revision;
  call open_volume;
};

struct file {
  word revision;
  call open, close, delete, read, write, get_position, set_position;
};

enum { BY_HANDLE = 2, READ = 1, BLOCK = 4096, LONG = 1 << 20, MESSAGE = 3, USB = 5, SATA = 18 };
#define GIB (1ull << 30)
#define STEP (64ull << 20)
#define SIZE (5 * GIB)

static byte buffer[LONG] __attribute__((aligned(8)));

/* The bus of a device path: UEFI 2.10, 10.3.4. */
static const char *bus(void *handle)
{
  const byte *node;
  if (BOOT(HANDLE_PROTOCOL, handle, &DEVICE_PATH, &node) != 0)
    return "?";
  for (word i = 0; node[0] != 0x7f && i < 16; i++, node += node[2] | node[3] << 8) {
    if (node[0] == MESSAGE && node[1] == USB)
      return "USB";
    if (node[0] == MESSAGE && node[1] == SATA)
      return "SATA";
  }
  return "?";
}

static word read_at(struct file *file, word place, word length)
{
  word got = length, status = file->set_position(file, place);
  if (status == 0)
    status = file->read(file, &got, buffer);
  if (status != 0)
    say("wrong: reading %d bytes at %d: %e\n", length, place, status);
  return status == 0 ? got : 0;
}

/* Whether the buffer begins with a word and, if it has one, a number and the end of a line. */
static int says(const char *text, word number)
{
  word at = 0, found = 0;
  while (text[at] && buffer[at] == (byte)text[at])
    at++;
  if (text[at])
    return 0;
  while (buffer[at] >= '0' && buffer[at] <= '9')
    found = found * 10 + buffer[at++] - '0';
  return found == number && buffer[at] == '\n';
}

/* Each 64 MiB, from the end to the start. */
static word marks(struct file *file)
{
  word right = 0;
  for (word place = SIZE - STEP;; place -= STEP) {
    if (read_at(file, place, BLOCK) == BLOCK && says("place ", place))
      right++;
    if (place == 0)
      return right;
  }
}

/* Reads in long pieces from one place to another; all but the marks is zeros. */
static word in_order(struct file *file, word from, word to)
{
  word right = 0;
  for (word place = from; place < to; place += LONG) {
    word got = read_at(file, place, LONG), rest = 0;
    int marked = place % STEP == 0;
    for (word i = marked ? BLOCK : 0; i < got; i += sizeof(word))
      rest |= *(word *)(buffer + i);
    right += got == LONG && rest == 0 && (!marked || says("place ", place));
  }
  return right;
}

static void read_file(const char *name, struct file *file)
{
  word size, status, got;
  say("fact file on %s, marks: %d right of %d\n", name, marks(file), SIZE / STEP);
  say("fact file on %s, over 2 GiB: %d MiB right\n", name,
    in_order(file, 2 * GIB - 8 * LONG, 2 * GIB + 8 * LONG));
  say("fact file on %s, over 4 GiB: %d MiB right\n", name,
    in_order(file, 4 * GIB - 8 * LONG, 4 * GIB + 8 * LONG));
  got = read_at(file, SIZE, BLOCK);
  say("fact file on %s, end: %d bytes, %s\n", name, got, says("last", 0) ? "right" : "wrong");
  got = read_at(file, SIZE - 3, 8);
  say("fact file on %s, over the last sector: %d bytes\n", name, got);
  status = file->set_position(file, ~0ull);
  if (status == 0)
    status = file->get_position(file, &size);
  say("fact file on %s, length: %e, %d\n", name, status, size);
}

/* Opens a file in every file system; returns how many have it. */
static word each(const letter *name, void (*then)(const char *, struct file *))
{
  void **handles;
  word count = 0, status, found = 0;
  status = BOOT(LOCATE_HANDLE_BUFFER, (word)BY_HANDLE, &FILE_SYSTEM, 0ull, &count, &handles);
  for (word i = 0; status == 0 && i < count; i++) {
    struct file_system *system;
    struct file *root, *file;
    if (BOOT(HANDLE_PROTOCOL, handles[i], &FILE_SYSTEM, &system) != 0
        || system->open_volume(system, &root) != 0
        || root->open(root, &file, name, (word)READ, 0ull) != 0)
      continue;
    if (then != 0)
      then(bus(handles[i]), file);
    found++;
  }
  return found;
}

void file(void)
{
  say("fact file systems with the file: %d\n", each(L"\\big.bin", read_file));
}

static void read_all(const char *name, struct file *file)
{
  say("fact file on %s, whole: %d MiB right\n", name, in_order(file, 0, SIZE));
}

void whole_file(void)
{
  say("fact file systems with the file: %d\n", each(L"\\big.bin", read_all));
}

int is_there(const letter *name)
{
  return each(name, 0) != 0;
}

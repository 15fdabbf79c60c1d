/* The screen as a loader sees it: modes, their layout, and the frame buffer. */
#include "loader.h"

static const struct guid GOP = {
  0x9042a9de, 0x23dc, 0x4a38, {0x96, 0xfb, 0x7a, 0xde, 0xd0, 0x80, 0x51, 0x6a}
};

/* UEFI 2.10, 12.9 */
struct mode_information {
  dword version, width, height, format, masks[4], stride;
};

struct mode {
  dword modes, current;
  struct mode_information *information;
  word information_size, frame_buffer, frame_buffer_size;
};

struct gop {
  call query, set, blt;
  struct mode *mode;
};

enum { FILL = 0, TO_MEMORY = 1, ADDRESS = 0xcf8, DATA = 0xcfc, FUNCTIONS = 256, BARS = 6 };

static dword configuration(word function, word offset)
{
  out32(ADDRESS, 1u << 31 | function << 8 | offset);
  return in32(DATA);
}

static void set_configuration(word function, word offset, dword value)
{
  out32(ADDRESS, 1u << 31 | function << 8 | offset);
  out32(DATA, value);
}

/* The size of the BAR at `offset`: bits that cannot be set are the size. */
static word bar_size(word function, word offset)
{
  dword command = configuration(function, 4), old = configuration(function, offset), mask;
  set_configuration(function, 4, command & 0xfffffffc);
  set_configuration(function, offset, ~0u);
  mask = configuration(function, offset) & ~0xfu;
  set_configuration(function, offset, old);
  set_configuration(function, 4, command & 0xffff);
  return ~mask + 1u;
}

/* Whether a memory BAR of a display contains the range. */
static int in_a_bar(word start, word length)
{
  for (word function = 0; function < FUNCTIONS; function++) {
    if (configuration(function, 8) >> 24 != 3)
      continue;
    for (word bar = 0; bar < BARS; bar++) {
      dword low = configuration(function, 0x10 + 4 * bar);
      word base = low & ~0xfu, offset = 0x10 + 4 * bar;
      int wide = (low & 6) == 4;
      if (low & 1)
        continue;
      if (wide)
        base |= (word)configuration(function, offset + 4) << 32;
      if (base != 0 && start >= base && start + length <= base + bar_size(function, offset))
        return 1;
      bar += wide;
    }
  }
  return 0;
}

/* Draws with Blt, and reads the pixels in the frame buffer. */
static void draw(struct gop *gop)
{
  static const dword colour = 0x00123456;
  struct mode_information *now = gop->mode->information;
  volatile dword *pixels = (volatile dword *)gop->mode->frame_buffer;
  word last = (word)now->stride * (now->height - 1) + now->width - 1;
  word status = gop->blt(gop, &colour, (word)FILL, 0ull, 0ull, 0ull, 0ull, (word)now->width,
    (word)now->height, 0ull);
  dword back = 0;
  say("fact screen drawing: %e, first pixel %x, last %x\n", status,
    (word)(pixels[0] & 0xffffff), (word)(pixels[last] & 0xffffff));
  pixels[last] = 0x00654321;
  status = gop->blt(gop, &back, (word)TO_MEMORY, now->width - 1ull, now->height - 1ull, 0ull, 0ull,
    1ull, 1ull, 0ull);
  say("fact screen reading: %e, last pixel %x\n", status, (word)(back & 0xffffff));
}

static void modes(struct gop *gop)
{
  for (word number = 0; number < gop->mode->modes; number++) {
    struct mode_information *mode;
    word size, status = gop->query(gop, number, &size, &mode);
    if (status != 0) {
      say("wrong: mode %d: %e\n", number, status);
      continue;
    }
    say("fact screen mode %dx%d: stride %d, format %d\n", (word)mode->width, (word)mode->height,
      (word)mode->stride, (word)mode->format);
    status = gop->set(gop, number);
    if (status != 0)
      say("wrong: mode %d cannot be set: %e\n", number, status);
    if (gop->mode->frame_buffer_size < 4ull * mode->stride * mode->height)
      say("wrong: mode %d: the frame buffer is too small\n", number);
    if (!in_a_bar(gop->mode->frame_buffer, gop->mode->frame_buffer_size))
      say("wrong: mode %d: the frame buffer is in no BAR of a display\n", number);
  }
}

void screen(void)
{
  struct gop *gop;
  word status = BOOT(LOCATE_PROTOCOL, &GOP, 0ull, &gop), first;
  say("fact screen protocol: %e\n", status);
  if (status != 0)
    return;
  first = gop->mode->current;
  say("fact screen first mode: %dx%d, stride %d, format %d\n",
    (word)gop->mode->information->width, (word)gop->mode->information->height,
    (word)gop->mode->information->stride, (word)gop->mode->information->format);
  modes(gop);
  say("fact screen back to the first mode: %e\n", gop->set(gop, first));
  say("fact screen mode that is not there: %e\n", gop->set(gop, (word)gop->mode->modes));
  draw(gop);
}

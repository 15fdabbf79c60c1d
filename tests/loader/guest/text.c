/* Lines of text, and arithmetic on bytes. */
#include "loader.h"

#include <stdarg.h>

enum { LINE = 1024 };

/* The line that is being built. Longer lines are cut. */
static char line[LINE];
static word used;

static void put(char letter)
{
  if (used < LINE)
    line[used++] = letter;
}

static void put_number(word number, word base, word digits)
{
  char text[20];
  word count = 0;
  do {
    text[count++] = "0123456789abcdef"[number % base];
    number /= base;
  } while (number != 0 || count < digits);
  while (count > 0)
    put(text[--count]);
}

static void put_text(const char *text)
{
  while (*text)
    put(*text++);
}

static void put_letters(const letter *text)
{
  for (; *text; text++)
    put(*text > ' ' && *text < 127 ? *text : '_');
}

static void put_guid(const struct guid *guid)
{
  put_number(guid->a, 16, 8);
  put('-');
  put_number(guid->b, 16, 4);
  put('-');
  put_number(guid->c, 16, 4);
  put('-');
  for (word i = 0; i < 8; i++)
    put_number(guid->d[i], 16, 2);
}

/* UEFI 2.10, appendix D. Text in arrays, because pointers would not move with the address map. */
static void put_status(word status)
{
  static const char names[][24] = {
    "SUCCESS", "LOAD_ERROR", "INVALID_PARAMETER", "UNSUPPORTED", "BAD_BUFFER_SIZE",
    "BUFFER_TOO_SMALL", "NOT_READY", "DEVICE_ERROR", "WRITE_PROTECTED", "OUT_OF_RESOURCES",
    "VOLUME_CORRUPTED", "VOLUME_FULL", "NO_MEDIA", "MEDIA_CHANGED", "NOT_FOUND", "ACCESS_DENIED",
    "NO_RESPONSE", "NO_MAPPING", "TIMEOUT", "NOT_STARTED", "ALREADY_STARTED", "ABORTED",
    "ICMP_ERROR", "TFTP_ERROR", "PROTOCOL_ERROR", "INCOMPATIBLE_VERSION", "SECURITY_VIOLATION"
  };
  word number = status & ~ERROR(0);
  if (number < sizeof names / sizeof *names && (number == 0) == (status == 0))
    put_text(names[number]);
  else
    put_number(status, 16, 16);
}

void say(const char *format, ...)
{
  va_list values;
  va_start(values, format);
  used = 0;
  for (; *format; format++) {
    if (*format != '%') {
      if (*format == '\n')
        put('\r');
      put(*format);
      continue;
    }
    switch (*++format) {
    case 's': put_text(va_arg(values, const char *)); break;
    case 'w': put_letters(va_arg(values, const letter *)); break;
    case 'g': put_guid(va_arg(values, const struct guid *)); break;
    case 'e': put_status(va_arg(values, word)); break;
    case 'd': put_number(va_arg(values, word), 10, 1); break;
    case 'b': put_number(va_arg(values, word), 16, 2); break;
    case 'x': put_text("0x"); put_number(va_arg(values, word), 16, 1); break;
    }
  }
  va_end(values);
  print(line, used);
}

int same(const void *a, const void *b, word length)
{
  for (word i = 0; i < length; i++)
    if (((const byte *)a)[i] != ((const byte *)b)[i])
      return 0;
  return 1;
}

byte sum(const byte *from, word length)
{
  byte total = 0;
  for (word i = 0; i < length; i++)
    total += from[i];
  return total;
}

/* FNV-1a. */
word hash(const byte *from, word length)
{
  word value = 0xcbf29ce484222325;
  for (word i = 0; i < length; i++)
    value = (value ^ from[i]) * 0x100000001b3;
  return value;
}

dword get32(const byte *at)
{
  return at[0] | at[1] << 8 | at[2] << 16 | (dword)at[3] << 24;
}

word get64(const byte *at)
{
  return get32(at) | (word)get32(at + 4) << 32;
}

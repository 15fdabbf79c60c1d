/* Text on the first serial port, and the conversions of printf that the drivers and checks use. */
#include "machine.h"

enum { COM1 = 0x3f8, COM1_LINE_STATUS = 0x3fd, TRANSMITTER_EMPTY = 0x20 };
/* The maximum length of a line; the rest is cut off. */
enum { MAX_TEXT = 400 };

typedef struct {
    char bytes[MAX_TEXT];
    int length;
} Text;

/* A conversion. `%08llx` is long long, has the width 8, and is padded with zeros. */
typedef struct {
    int wide, width;
    char fill, kind;
} Conversion;

static void send(char byte)
{
    for (int i = 0; i < 100000 && !(in8(COM1_LINE_STATUS) & TRANSMITTER_EMPTY); i++)
        ;
    out8(COM1, byte);
}

static void put(Text *text, char byte)
{
    if (text->length < MAX_TEXT)
        text->bytes[text->length++] = byte;
}

static void put_number(Text *text, u64 value, u32 base, Conversion how)
{
    char reversed[24];
    int digits = 0;
    do
        reversed[digits++] = "0123456789abcdef"[value % base];
    while (value /= base);
    for (int i = digits; i < how.width; i++)
        put(text, how.fill);
    while (digits)
        put(text, reversed[--digits]);
}

static void put_signed(Text *text, long long value, Conversion how)
{
    if (value < 0)
        put(text, '-');
    put_number(text, value < 0 ? -(u64)value : (u64)value, 10, how);
}

/* Parses a conversion. Moves `*format` from the character after the percent sign to the letter. */
static Conversion read_conversion(const char **format)
{
    Conversion how = {.fill = **format == '0' ? '0' : ' '};
    for (;; ++*format) {
        char letter = **format;
        if (letter >= '0' && letter <= '9')
            how.width = how.width * 10 + letter - '0';
        else if (letter == 'z' || letter == 'I' || (letter == 'l' && (*format)[1] == 'l'))
            how.wide = 1;
        else if (letter != 'l')
            break;
    }
    how.kind = **format;
    return how;
}

static void put_argument(Text *text, Conversion how, va_list *list)
{
    switch (how.kind) {
    case 's':
        for (const char *at = va_arg(*list, const char *); at && *at; at++)
            put(text, *at);
        break;
    case 'c':
        put(text, va_arg(*list, int));
        break;
    case 'p':
        put_number(text, va_arg(*list, u64), 16, how);
        break;
    case 'd':
    case 'i':
        put_signed(text, how.wide ? va_arg(*list, long long) : va_arg(*list, int), how);
        break;
    case 'u':
        put_number(text, how.wide ? va_arg(*list, u64) : va_arg(*list, u32), 10, how);
        break;
    case 'x':
    case 'X':
        put_number(text, how.wide ? va_arg(*list, u64) : va_arg(*list, u32), 16, how);
        break;
    default:
        put(text, how.kind);
    }
}

static int line;
static u32 depth;

void print_begin(void)
{
    spin_lock(&line);
    depth++;
}

void print_end(void)
{
    if (!--depth)
        spin_unlock(&line);
}

void print_list(const char *format, va_list list)
{
    Text text = {.length = 0};
    for (; *format; format++) {
        if (*format != '%') {
            put(&text, *format);
            continue;
        }
        format++;
        Conversion how = read_conversion(&format);
        if (!how.kind)
            break;
        put_argument(&text, how, &list);
    }
    print_begin();
    for (int i = 0; i < text.length; i++)
        send(text.bytes[i]);
    print_end();
}

void print(const char *format, ...)
{
    va_list list;
    va_start(list, format);
    print_list(format, list);
    va_end(list);
}

/* The drivers' debug messages (see missing.h). Levels above 2 print at every request. */
void windrv_debug(int level, const char *format, ...)
{
    if (level > 2)
        return;
    va_list list;
    va_start(list, format);
    print_begin();
    print("# driver: ");
    print_list(format, list);
    print("\n");
    print_end();
    va_end(list);
}

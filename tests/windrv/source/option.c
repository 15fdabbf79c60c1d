/* The kernel's command line: words NAME=VALUE. */
#include "machine.h"

static char line[1024];

void options_read(const char *command_line)
{
    for (u32 i = 0; i < sizeof line - 1 && command_line[i]; i++)
        line[i] = command_line[i];
}

/* The text behind `NAME=`, up to the end of the line; NULL without such a word. */
const char *option(const char *name)
{
    size_t length = strlen(name);
    for (const char *at = line; *at; at++)
        if ((at == line || at[-1] == ' ') && !memcmp(at, name, length) && at[length] == '=')
            return at + length + 1;
    return NULL;
}

u64 option_number(const char *name, u64 otherwise)
{
    const char *at = option(name);
    if (!at)
        return otherwise;
    u64 value = 0;
    for (; *at >= '0' && *at <= '9'; at++)
        value = value * 10 + *at - '0';
    return value;
}

/* Included before each source of vioserial: kernel.h, and strings. */
#ifndef WINDRV_SERIAL_H
#define WINDRV_SERIAL_H
#include "kernel.h"

typedef unsigned int UINT;

/* Text that only the framework reads, and the name of a symbolic link. */
NTSTATUS RtlUnicodeStringPrintf(PUNICODE_STRING, PCWSTR format, ...);
NTSTATUS RtlStringCbCopyA(PCHAR to, size_t length, PCSTR from);
#define RtlULongAdd(a, b, sum) (*(sum) = (a) + (b), STATUS_SUCCESS)
#endif

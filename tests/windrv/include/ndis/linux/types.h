/* In place of VirtIO/linux/types.h, whose names are macros of two words, which C++ does not accept
 * as functions: `u16(x)`. */
#ifndef _LINUX_TYPES_H
#define _LINUX_TYPES_H
#define __bitwise__
typedef unsigned char u8, __u8;
typedef unsigned short u16, __u16, __le16;
typedef unsigned long u32, __u32, __le32;
typedef unsigned long long u64, __u64;
#endif

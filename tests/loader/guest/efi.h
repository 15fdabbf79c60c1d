/* The parts of the UEFI 2.10 interface that the guest uses. Functions have no
 * prototypes: every argument is a pointer or a `word`. */
#ifndef EFI_H
#define EFI_H

typedef unsigned char byte;
typedef unsigned short letter;
typedef unsigned short half;
typedef unsigned int dword;
typedef unsigned long long word;
typedef word (*call)();

struct guid {
  dword a;
  half b, c;
  byte d[8];
};

/* 4.2 */
struct header {
  word signature;
  dword revision, length, checksum, reserved;
};

/* 4.4 and 4.5: the services by their numbers. */
enum boot_service {
  GET_MEMORY_MAP = 4, HANDLE_PROTOCOL = 16, EXIT_BOOT_SERVICES = 26, SET_WATCHDOG_TIMER = 29,
  LOCATE_HANDLE_BUFFER = 36, LOCATE_PROTOCOL = 37, CALCULATE_CRC32 = 40
};

enum runtime_service {
  GET_TIME, SET_TIME, GET_WAKEUP_TIME, SET_WAKEUP_TIME, SET_VIRTUAL_ADDRESS_MAP, CONVERT_POINTER,
  GET_VARIABLE, GET_NEXT_VARIABLE_NAME, SET_VARIABLE, GET_NEXT_HIGH_MONOTONIC_COUNT, RESET_SYSTEM,
  UPDATE_CAPSULE, QUERY_CAPSULE_CAPABILITIES, QUERY_VARIABLE_INFO, RUNTIME_SERVICES
};

struct boot_services {
  struct header header;
  call function[44];
};

struct runtime_services {
  struct header header;
  call function[RUNTIME_SERVICES];
};

/* 4.6 */
struct configuration {
  struct guid guid;
  byte *table;
};

/* 4.3 */
struct system_table {
  struct header header;
  letter *vendor;
  dword revision;
  void *consoles[6];
  struct runtime_services *runtime;
  struct boot_services *boot;
  word configurations;
  struct configuration *configuration;
};

/* 9.1 */
struct loaded_image {
  dword revision;
  void *parent, *table, *device, *path, *reserved;
  dword options_length;
  void *options;
  byte *base;
  word size;
};

/* 7.2.3 */
struct descriptor {
  dword type, padding;
  word physical, virtual, pages, attributes;
};

enum { RUNTIME_CODE = 5, RUNTIME_DATA = 6, MAPPED_IO = 11, MEMORY_TYPES = 16 };
#define MEMORY_RUNTIME (1ull << 63)
#define PAGE 4096ull

/* Appendix D */
#define ERROR(number) (1ull << 63 | (number))

/* 8.2 */
enum { NON_VOLATILE = 1, AT_BOOT = 2, AT_RUN_TIME = 4, APPEND = 0x40 };

/* 8.3 */
struct time {
  half year;
  byte month, day, hour, minute, second, padding;
  dword nanosecond;
  half zone;
  byte daylight, padding2;
};

#endif

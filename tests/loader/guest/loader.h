/* The parts of the guest. Each prints facts: lines `fact NAME: VALUE` without
 * addresses, so that two machines can be compared, and `wrong: ...` for
 * anything that no machine may have. */
#ifndef LOADER_H
#define LOADER_H

#include "efi.h"

/* machine.c */
void out8(half port, byte value);
byte in8(half port);
dword in32(half port);
void out32(half port, dword value);
word cycles(void);
void print(const char *text, word length);
void own_descriptors(void);
void __attribute__((noreturn)) halt(void);

/* text.c: %s text, %w UEFI text, %d and %x numbers, %b a byte as two digits, %g
 * a GUID, %e a status. */
void say(const char *format, ...);
int same(const void *a, const void *b, word length);
byte sum(const byte *from, word length);
word hash(const byte *from, word length);
dword get32(const byte *at);
word get64(const byte *at);

/* main.c: the tables of the firmware. `runtime` moves with the address map. */
extern struct system_table *table;
extern struct boot_services *boot;
extern struct runtime_services *runtime;

/* Calls of services. */
#define BOOT(service, ...) boot->function[service](__VA_ARGS__)
#define RUNTIME(service, ...) runtime->function[service](__VA_ARGS__)

void screen(void);
void tables(void);
void tpm(void);
void memory(void);
void file(void);
void whole_file(void);
int is_there(const letter *name);
void __attribute__((noreturn)) leave_boot_services(void *image, void (*then)(void));

/* variables.c */
void variables_of_boot_services(void);
void variables_of_run_time(void);
void variables_after_reset(void);
void fill_store(void);
word step(void);
void set_step(word number);

/* clock.c: `when` becomes a part of the facts' names. */
void clock_reads(const char *when);
void clock_sets(void);

#endif

/* An EFI program that does what the boot manager, the loader and the early
 * kernel of Windows do with firmware, and prints what it sees. It resets the
 * machine twice, cold and warm, and then switches it off. */
#include "loader.h"

enum { COLD, WARM, SHUTDOWN };

struct system_table *table;
struct boot_services *boot;
struct runtime_services *runtime;

/* The step that this start of the machine is. */
static word now;
/* Whether the disk has the file `full`: then the store of variables is filled, and nothing else. */
static int full;
/* Whether it has the file `whole`: then each byte of the big file is read, and nothing else. */
static int whole;

/* Runs at high addresses, after the boot services. */
static void early_kernel(void)
{
  own_descriptors();
  say("note in the early kernel, start %d\n", now);
  if (now == 0)
    clock_reads("at run time");
  if (now == 0 && full) {
    fill_store();
  } else if (now == 0 && !whole) {
    clock_sets();
    variables_of_run_time();
  }
  say("note reset %d\n", now);
  if (now == SHUTDOWN)
    say(">>>loader end\n");
  RUNTIME(RESET_SYSTEM, now, 0ull, 0ull, 0ull);
  say("wrong: ResetSystem returned\n");
  halt();
}

/* The checksum of a table: UEFI 2.10, 4.2. */
static void check_header(const char *name, struct header *header)
{
  dword right = header->checksum, found = 0;
  header->checksum = 0;
  BOOT(CALCULATE_CRC32, header, (word)header->length, &found);
  header->checksum = right;
  say("fact firmware %s: revision %x, length %d\n", name, (word)header->revision,
    (word)header->length);
  if (found != right)
    say("wrong: %s: checksum %x, not %x\n", name, (word)right, (word)found);
}

static void firmware(void)
{
  say("fact firmware vendor: %w\n", table->vendor);
  say("fact firmware revision: %x\n", (word)table->revision);
  check_header("system table", &table->header);
  check_header("boot services", &boot->header);
  check_header("runtime services", &runtime->header);
}

word efi_main(void *image, struct system_table *system)
{
  table = system;
  boot = system->boot;
  runtime = system->runtime;
  BOOT(SET_WATCHDOG_TIMER, 0ull, 0ull, 0ull, 0ull);
  now = step();
  if (now == 0)
    say("\n>>>loader begin\n");
  say("note start %d\n", now);
  full = is_there(L"\\full");
  whole = is_there(L"\\whole");
  if (now == 0 && whole) {
    whole_file();
  } else if (now == 0 && !full) {
    firmware();
    screen();
    tables();
    memory();
    tpm();
    file();
    clock_reads("of boot services");
    variables_of_boot_services();
  } else if (now > 0 && !whole) {
    variables_after_reset();
  }
  /* Later, a full store does not take it. */
  set_step(now + 1);
  leave_boot_services(image, early_kernel);
}

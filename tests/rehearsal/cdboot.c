/* The loader of a boot image that asks, as cdboot.efi of Microsoft's does: it
 * waits five seconds for a key. Without one, firmware goes on to the next entry.
 * No test presses one: a medium must start without its question. */

typedef unsigned long long word;
typedef unsigned short letter;
typedef word (*__attribute__((ms_abi)) call)();

struct input {
  call reset, read;
  void *wait;
};

struct output {
  call reset, print;
};

/* UEFI 2.10, 4.3: the system table up to the boot services. */
struct table {
  char header[24];
  void *vendor;
  unsigned revision, padding;
  void *in_handle;
  struct input *in;
  void *out_handle;
  struct output *out;
  void *error_handle, *error;
  void *runtime;
  struct services *boot;
};

/* UEFI 2.10, 4.4: the boot services up to Stall, which is the thirtieth function. */
struct services {
  char header[24];
  call before[28];
  call stall;
};

enum { SECONDS = 5, TICKS = 10, NOT_FOUND = 14 };

word __attribute__((ms_abi)) efi_main(void *image, struct table *table)
{
  static const letter question[] = L"Press any key to boot from CD or DVD...";
  static const letter pressed[] = L"\r\na key was pressed, and nothing is here\r\n";
  static const letter none[] = L"\r\nno key was pressed\r\n";
  struct { letter code, character; } key;
  (void)image;
  table->out->print(table->out, question);
  for (int tick = 0; tick < SECONDS * TICKS; tick++) {
    if (table->in->read(table->in, &key) == 0) {
      table->out->print(table->out, pressed);
      return (1ull << 63) | NOT_FOUND;
    }
    table->boot->stall(1000000ull / TICKS);
  }
  table->out->print(table->out, none);
  return (1ull << 63) | NOT_FOUND;
}

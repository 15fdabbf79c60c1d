/* The loader of a boot image that asks, as cdboot.efi of Microsoft's does: it
 * waits five seconds for a key, and starts LOADER with one. Without one, firmware
 * goes on to the next entry. */

typedef unsigned long long word;
typedef unsigned short letter;
typedef unsigned char byte;
typedef word (*__attribute__((ms_abi)) call)();

struct input {
  call reset, read;
};

struct output {
  call reset, print;
};

/* UEFI 2.10, 4.4: the boot services by their numbers. */
struct services {
  char header[24];
  call function[44];
};

enum { HANDLE_PROTOCOL = 16, LOAD_IMAGE = 22, START_IMAGE = 23, STALL = 28 };

/* UEFI 2.10, 4.3: the system table up to the boot services. */
struct table {
  char header[24];
  void *vendor;
  word revision;
  void *in_handle;
  struct input *in;
  void *out_handle;
  struct output *out;
  void *error_handle, *error, *runtime;
  struct services *boot;
};

/* UEFI 2.10, 9.1: a loaded image up to its device. */
struct loaded {
  word revision;
  void *parent, *table, *device;
};

struct guid {
  unsigned a;
  unsigned short b, c;
  byte d[8];
};

/* UEFI 2.10, 10.2: the header of a node, which is not aligned. */
struct node {
  byte type, subtype, length[2];
};

enum { SECONDS = 5, TICKS = 10, MAX_PATH = 1024, FILE_NODE = 4, END_NODE = 0x7f };

static const struct guid LOADED_IMAGE = {
  0x5b1b31a1, 0x9562, 0x11d2, {0x8e, 0x3f, 0x00, 0xa0, 0xc9, 0x69, 0x72, 0x3b}
};
static const struct guid DEVICE_PATH = {
  0x09576e91, 0x6d3f, 0x11d2, {0x8e, 0x39, 0x00, 0xa0, 0xc9, 0x69, 0x72, 0x3b}
};
static const letter LOADER[] = L"\\EFI\\BOOT\\shimx64.efi";

static void append(byte *to, unsigned *at, const void *from, unsigned length)
{
  for (unsigned i = 0; i < length; i++)
    to[(*at)++] = ((const byte *)from)[i];
}

/* Starts LOADER from the device of this program. Returns if it cannot. */
static word start(void *image, struct services *boot)
{
  static byte path[MAX_PATH];
  const struct node file = {FILE_NODE, 4, {sizeof file + sizeof LOADER, 0}};
  const struct node end = {END_NODE, 0xff, {sizeof end, 0}};
  struct loaded *loaded;
  const byte *device;
  void *handle;
  unsigned at = 0;
  word status = boot->function[HANDLE_PROTOCOL](image, &LOADED_IMAGE, &loaded);
  if (status == 0)
    status = boot->function[HANDLE_PROTOCOL](loaded->device, &DEVICE_PATH, &device);
  if (status != 0)
    return status;
  while (device[at] != END_NODE && at < MAX_PATH / 2) {
    unsigned length = device[at + 2] | device[at + 3] << 8;
    append(path, &at, device + at, length < MAX_PATH / 2 ? length : 0);
  }
  append(path, &at, &file, sizeof file);
  append(path, &at, LOADER, sizeof LOADER);
  append(path, &at, &end, sizeof end);
  status = boot->function[LOAD_IMAGE]((word)0, image, path, (word)0, (word)0, &handle);
  return status != 0 ? status : boot->function[START_IMAGE](handle, (word)0, (word)0);
}

word __attribute__((ms_abi)) efi_main(void *image, struct table *table)
{
  static const letter question[] = L"Press any key to boot from CD or DVD...";
  static const letter none[] = L"\r\nno key was pressed\r\n";
  struct { letter code, character; } key;
  table->out->print(table->out, question);
  for (int tick = 0; tick < SECONDS * TICKS; tick++) {
    if (table->in->read(table->in, &key) == 0)
      return start(image, table->boot);
    table->boot->function[STALL](1000000ull / TICKS);
  }
  table->out->print(table->out, none);
  return 1ull << 63 | 14; /* EFI_NOT_FOUND */
}

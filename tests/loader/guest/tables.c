/* Configuration tables: ACPI from the RSDP to every table, SMBIOS from its
 * entry points to every structure. */
#include "loader.h"

static const struct guid ACPI_1 = {
  0xeb9d2d30, 0x2d88, 0x11d3, {0x9a, 0x16, 0x00, 0x90, 0x27, 0x3f, 0xc1, 0x4d}
};
static const struct guid ACPI_2 = {
  0x8868e871, 0xe4f1, 0x11d3, {0xbc, 0x22, 0x00, 0x80, 0xc7, 0x3c, 0x88, 0x81}
};
static const struct guid SMBIOS_2 = {
  0xeb9d2d31, 0x2d88, 0x11d3, {0x9a, 0x16, 0x00, 0x90, 0x27, 0x3f, 0xc1, 0x4d}
};
static const struct guid SMBIOS_3 = {
  0xf2fd1544, 0x9794, 0x4a2c, {0x99, 0x2e, 0xe5, 0xbb, 0xcf, 0x20, 0xe3, 0x94}
};

enum { HEADER = 36, MOST = 1 << 20, SIGNATURES = 64, TYPES = 256 };

/* The signatures seen so far; a second table of the same signature is #2. */
static dword seen[SIGNATURES];
static word seen_count;

static byte *find(const struct guid *guid)
{
  for (word i = 0; i < table->configurations; i++)
    if (same(guid, &table->configuration[i].guid, sizeof *guid))
      return table->configuration[i].table;
  return 0;
}

static word occurrence(dword signature)
{
  word count = 1;
  for (word i = 0; i < seen_count; i++)
    count += seen[i] == signature;
  if (seen_count < SIGNATURES)
    seen[seen_count++] = signature;
  return count;
}

/* The bytes of a table, for acpiexec. */
static void dump(const char *name, word number, const byte *at, word length)
{
  for (word start = 0; start < length; start += 64) {
    say("table %s %d ", name, number);
    for (word i = start; i < length && i < start + 64; i++)
      say("%b", (word)at[i]);
    say("\n");
  }
}

static const char *present(word address)
{
  return address ? "there" : "none";
}

static void acpi_table(const byte *at)
{
  char name[5] = {at[0], at[1], at[2], at[3], 0};
  word length = get32(at + 4), number = occurrence(get32(at));
  int firmware = same(name, "FACS", 4);
  for (word i = 0; i < 4; i++)
    if ((name[i] < 'A' || name[i] > 'Z') && (name[i] < '0' || name[i] > '9'))
      say("wrong: a table's signature is %x\n", (word)get32(at));
  if (length < HEADER || length > MOST) {
    say("wrong: %s #%d: length %d\n", name, number, length);
    return;
  }
  /* FACS has no checksum: ACPI 6.5, 5.2.10. */
  if (!firmware && sum(at, length) != 0)
    say("wrong: %s #%d: the checksum of %d bytes is not 0\n", name, number, length);
  say("fact acpi table %s #%d: revision %d\n", name, number, firmware ? at[32] : (word)at[8]);
  if ((word)at % (firmware ? 64 : 4) != 0)
    say("wrong: %s #%d is not aligned\n", name, number);
  dump(name, number, at, length);
}

/* FADT: DSDT and FACS at 36 and 40, 64-bit ones at 140 and 132 (ACPI 6.5, 5.2.9). */
static void fadt(const byte *at)
{
  word length = get32(at + 4), dsdt = get32(at + 40), facs = get32(at + 36);
  if (length >= 148) {
    word wide = get64(at + 140);
    say("fact acpi DSDT: 32 bits %s, 64 bits %s\n", present(dsdt), present(wide));
    if (dsdt != 0 && wide != 0 && dsdt != wide)
      say("wrong: FADT has two addresses of the DSDT\n");
    dsdt = wide ? wide : dsdt;
    wide = get64(at + 132);
    say("fact acpi FACS: 32 bits %s, 64 bits %s\n", present(facs), present(wide));
    facs = wide ? wide : facs;
  }
  if (dsdt != 0)
    acpi_table((const byte *)dsdt);
  if (facs != 0)
    acpi_table((const byte *)facs);
}

static void acpi(const byte *rsdp)
{
  const byte *xsdt, *rsdt;
  if (rsdp == 0 || !same(rsdp, "RSD PTR ", 8) || sum(rsdp, 20) != 0 || sum(rsdp, 36) != 0) {
    say("wrong: no valid RSDP\n");
    return;
  }
  say("fact acpi RSDP: revision %d, length %d\n", (word)rsdp[15], (word)get32(rsdp + 20));
  rsdt = (const byte *)(word)get32(rsdp + 16);
  xsdt = (const byte *)get64(rsdp + 24);
  acpi_table(rsdt);
  acpi_table(xsdt);
  if ((get32(xsdt + 4) - HEADER) / 8 != (get32(rsdt + 4) - HEADER) / 4)
    say("wrong: XSDT and RSDT differ in length\n");
  for (word at = HEADER; at + 8 <= get32(xsdt + 4) && at < MOST; at += 8) {
    const byte *entry = (const byte *)get64(xsdt + at);
    acpi_table(entry);
    if (same(entry, "FACP", 4))
      fadt(entry);
  }
}

/* The structure after this one: its strings end with two zeros (SMBIOS 3.6, 6.1.3). */
static const byte *next_structure(const byte *at, const byte *end)
{
  at += at[1];
  while (at + 1 < end && (at[0] != 0 || at[1] != 0))
    at++;
  return at + 2;
}

static void structures(const char *name, const byte *at, word length)
{
  static word counts[TYPES];
  const byte *end = at + length;
  int ended = 0;
  for (word type = 0; type < TYPES; type++)
    counts[type] = 0;
  while (!ended && at + 4 <= end && at[1] >= 4 && at + at[1] <= end) {
    counts[at[0]]++;
    ended = at[0] == 127;
    at = next_structure(at, end);
  }
  if (!ended || at > end)
    say("wrong: %s: the structures do not end with type 127\n", name);
  for (word type = 0; type < TYPES; type++)
    if (counts[type] != 0)
      say("fact smbios structures of type %d: %d\n", type, counts[type]);
}

static void smbios(void)
{
  const byte *two = find(&SMBIOS_2), *three = find(&SMBIOS_3);
  say("fact smbios entry points: %s%s\n", two ? "2" : "", three ? "3" : "");
  if (two != 0 && (!same(two, "_SM_", 4) || sum(two, two[5]) != 0 || sum(two + 16, 15) != 0))
    say("wrong: the entry point of SMBIOS 2\n");
  else if (two != 0 && three == 0)
    structures("SMBIOS 2", (const byte *)(word)get32(two + 24), two[22] | two[23] << 8);
  if (three != 0 && (!same(three, "_SM3_", 5) || sum(three, three[6]) != 0))
    say("wrong: the entry point of SMBIOS 3\n");
  else if (three != 0)
    structures("SMBIOS 3", (const byte *)get64(three + 16), get32(three + 12));
}

void tables(void)
{
  for (word i = 0; i < table->configurations; i++)
    say("fact configuration table %g: there\n", &table->configuration[i].guid);
  if (find(&ACPI_1) != 0 && sum(find(&ACPI_1), 20) != 0)
    say("wrong: the checksum of the RSDP of ACPI 1\n");
  acpi(find(&ACPI_2));
  smbios();
}

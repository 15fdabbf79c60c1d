/* Variables, capsules and the counter: each attribute, before and after the
 * end of the boot services, and after a reset. */
#include "loader.h"

static const struct guid OURS = {
  0x7472616e, 0x736f, 0x6d21, {0x97, 0x10, 0x6c, 0x6f, 0x61, 0x64, 0x65, 0x72}
};
static const struct guid GLOBAL = {
  0x8be4df61, 0x93ca, 0x11d2, {0xaa, 0x0d, 0x00, 0xe0, 0x98, 0x03, 0x2b, 0x8c}
};

enum { ALL = NON_VOLATILE | AT_BOOT | AT_RUN_TIME, ATTRIBUTES = 0x80, NAME = 512, BIG = 1024 };
/* The store takes variables of 33 KiB at most. */
enum { BIGGEST = 32 << 10, FILLS = 10, MOST_FILLS = 90 };

/* Firmware reaches these in the early kernel, too. */
static byte data[64 << 10];
static letter name[NAME];

static word set(const letter *what, word attributes, const void *from, word length)
{
  return RUNTIME(SET_VARIABLE, what, &OURS, attributes, length, from);
}

static word get(const letter *what, dword *attributes, word *length)
{
  *length = sizeof data;
  *attributes = 0;
  return RUNTIME(GET_VARIABLE, what, &OURS, attributes, length, data);
}

word step(void)
{
  dword attributes;
  word length;
  return get(L"Step", &attributes, &length) == 0 ? data[0] : 0;
}

void set_step(word number)
{
  byte value = number;
  word status = set(L"Step", ALL, &value, 1ull);
  if (status != 0)
    say("wrong: the step cannot be kept: %e\n", status);
}

static void read(const char *when, const letter *what)
{
  dword attributes;
  word length, status = get(what, &attributes, &length);
  if (status != 0)
    say("fact variable %w %s: %e\n", what, when, status);
  else
    say("fact variable %w %s: attributes %x, %d bytes, hash %x\n", what, when, (word)attributes,
      length, hash(data, length));
}

/* Creates a variable with each value of the attributes, reads it, and deletes it. */
static void every_attribute(const char *when)
{
  for (word attributes = 0; attributes < ATTRIBUTES; attributes++) {
    dword found;
    word length, status = set(L"Try", attributes, "abcd", 4ull), got, gone;
    if (status != 0) {
      say("fact attributes %x %s: %e\n", attributes, when, status);
      continue;
    }
    got = get(L"Try", &found, &length);
    gone = set(L"Try", attributes & ~(word)APPEND, 0, 0ull);
    say("fact attributes %x %s: SUCCESS, read %e with %x, %d bytes, deleted %e\n", attributes, when,
      got, (word)found, length, gone);
    if (get(L"Try", &found, &length) == 0)
      say("wrong: a variable with attributes %x stays %s\n", attributes, when);
  }
}

/* The rules of UEFI 2.10, 8.2, for one variable that stays. */
static void one_variable(const char *when)
{
  dword attributes;
  word length = 2, status;
  say("fact variable Kept %s, created: %e\n", when, set(L"Kept", ALL, "first", 5ull));
  say("fact variable Kept %s, appended: %e\n", when, set(L"Kept", ALL | APPEND, " second", 7ull));
  say("fact variable Kept %s, appended nothing: %e\n", when, set(L"Kept", ALL | APPEND, 0, 0ull));
  read(when, L"Kept");
  say("fact variable Kept %s, other attributes: %e\n", when,
    set(L"Kept", NON_VOLATILE | AT_BOOT, "x", 1ull));
  say("fact variable Kept %s, replaced: %e\n", when, set(L"Kept", ALL, "second", 6ull));
  status = RUNTIME(GET_VARIABLE, L"Kept", &OURS, &attributes, &length, data);
  say("fact variable Kept %s, into two bytes: %e, length %d\n", when, status, length);
  length = sizeof data;
  status = RUNTIME(GET_VARIABLE, L"Kept", &OURS, 0ull, &length, 0ull);
  say("fact variable Kept %s, into nothing: %e\n", when, status);
  say("fact variable without a name %s: %e\n", when, set(L"", ALL, "x", 1ull));
  say("fact variable None %s, deleted: %e\n", when, set(L"None", ALL, 0, 0ull));
  status = RUNTIME(SET_VARIABLE, L"SetupMode", &GLOBAL, (word)AT_BOOT | AT_RUN_TIME, 1ull, "x");
  say("fact variable SetupMode %s, written: %e\n", when, status);
  status = RUNTIME(SET_VARIABLE, L"PK", &GLOBAL, (word)ALL, 1ull, "x");
  say("fact variable PK %s, written without a signature: %e\n", when, status);
}

/* Every variable with its attributes. Sizes of the firmware's own are the machine's. */
static void list(const char *when)
{
  struct guid guid = {0};
  word count = 0, status, size;
  name[0] = 0;
  for (;;) {
    dword attributes = 0;
    word length = sizeof data;
    size = sizeof name;
    status = RUNTIME(GET_NEXT_VARIABLE_NAME, &size, name, &guid);
    if (status != 0)
      break;
    count++;
    status = RUNTIME(GET_VARIABLE, name, &guid, &attributes, &length, data);
    say("fact list %s, %w %g: %e, attributes %x\n", when, name, &guid, status, (word)attributes);
  }
  say("fact list %s ends: %e\n", when, status);
  if (count == 0)
    say("wrong: there is no variable %s\n", when);
  name[0] = 0;
  size = sizeof *name;
  status = RUNTIME(GET_NEXT_VARIABLE_NAME, &size, name, &guid);
  say("fact list %s into one letter: %e\n", when, status);
  say("note the next name has %d bytes\n", size);
}

static void room(const char *when, word attributes)
{
  word most = 0, left = 0, one = 0;
  word status = RUNTIME(QUERY_VARIABLE_INFO, attributes, &most, &left, &one);
  say("fact room %s with %x: %e, at most %d, one %d\n", when, attributes, status, most, one);
  if (status == 0 && left > most)
    say("wrong: room %s: %d of %d are left\n", when, left, most);
  say("note %d bytes are left\n", left);
}

static void rooms(const char *when)
{
  static const byte which[] = {0, 1, 2, 3, 4, 6, 7, 0x0a, 0x0b, 0x0f, 0x17, 0x27, 0x47};
  for (word i = 0; i < sizeof which; i++)
    room(when, which[i]);
}

/* A capsule of a kind that no firmware knows: UEFI 2.10, 8.5.3. */
static void capsules(void)
{
  static struct { struct guid guid; dword header, flags, length; } capsule;
  static const dword flags[] = {0, 0x10000, 0x30000, 0x50000};
  static void *all[1];
  capsule.guid = OURS;
  capsule.header = capsule.length = sizeof capsule;
  all[0] = &capsule;
  say("fact capsules, none: %e\n", RUNTIME(UPDATE_CAPSULE, all, 0ull, 0ull));
  for (word i = 0; i < sizeof flags / sizeof *flags; i++) {
    word most = 0, status, asked;
    dword reset = 0;
    capsule.flags = flags[i];
    status = RUNTIME(UPDATE_CAPSULE, all, 1ull, 0ull);
    asked = RUNTIME(QUERY_CAPSULE_CAPABILITIES, all, 1ull, &most, &reset);
    say("fact capsules with flags %x: %e, asked before %e\n", (word)flags[i], status, asked);
  }
}

static void counter(void)
{
  dword first = 0, second = 0;
  word status = RUNTIME(GET_NEXT_HIGH_MONOTONIC_COUNT, &first);
  say("fact counter: %e\n", status);
  status = RUNTIME(GET_NEXT_HIGH_MONOTONIC_COUNT, &second);
  say("fact counter again: %e, %d more\n", status, (word)(second - first));
}

/* Writes variables of one size until the store refuses; returns how many it took. */
static word fill(word size, letter first)
{
  letter what[] = L"Fill??";
  word status, count = 0;
  do {
    what[4] = first;
    what[5] = '!' + count;
    status = set(what, ALL, data, size);
    count += status == 0;
  } while (status == 0 && count < MOST_FILLS);
  say("fact full store, variables of %d bytes: then %e\n", size, status);
  return count;
}

/* Fills the store with smaller and smaller variables, and deletes them. Firmware gets their room
 * back at the next start. */
void fill_store(void)
{
  letter what[] = L"Fill??";
  word counts[FILLS], wrong = 0, size = BIGGEST;
  set(L"Kept", ALL, "second", 6ull);
  for (word i = 0; i < FILLS; i++, size /= 2)
    counts[i] = fill(size, 'A' + i);
  say("fact full store, one more: %e\n", set(L"More", ALL, data, (word)BIG));
  read("in a full store", L"Kept");
  for (word i = 0; i < FILLS; i++)
    for (word number = 0; number < counts[i]; number++) {
      what[4] = 'A' + i;
      what[5] = '!' + number;
      wrong += set(what, ALL, 0, 0ull) != 0;
    }
  say("fact full store, variables that cannot be deleted: %d\n", wrong);
  read("after a full store", L"Kept");
}

void variables_of_boot_services(void)
{
  const char *when = "of boot services";
  every_attribute(when);
  one_variable(when);
  say("fact variable AtBoot, created: %e\n", set(L"AtBoot", NON_VOLATILE | AT_BOOT, "boot", 4ull));
  say("fact variable Passing, created: %e\n", set(L"Passing", AT_BOOT | AT_RUN_TIME, "pass", 4ull));
  say("fact variable PassingAtBoot, created: %e\n", set(L"PassingAtBoot", AT_BOOT, "pass", 4ull));
  rooms(when);
  list(when);
}

void variables_of_run_time(void)
{
  const char *when = "at run time", *before = "after boot services";
  read(before, L"Kept");
  read(before, L"AtBoot");
  read(before, L"Passing");
  read(before, L"PassingAtBoot");
  say("fact variable Passing %s, replaced: %e\n", when,
    set(L"Passing", AT_BOOT | AT_RUN_TIME, "x", 1ull));
  say("fact variable AtBoot %s, replaced: %e\n", when,
    set(L"AtBoot", NON_VOLATILE | AT_BOOT, "x", 1ull));
  every_attribute(when);
  one_variable(when);
  rooms(when);
  list(when);
  capsules();
  counter();
}

void variables_after_reset(void)
{
  const char *when = step() == 1 ? "after a cold reset" : "after a warm reset";
  word status;
  read(when, L"Kept");
  read(when, L"AtBoot");
  read(when, L"Passing");
  read(when, L"PassingAtBoot");
  read(when, L"Try");
  status = set(L"More", ALL, data, (word)BIG);
  say("fact variable More %s: created %e, deleted %e\n", when, status, set(L"More", ALL, 0, 0ull));
}

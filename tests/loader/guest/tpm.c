/* The TPM's protocol and event log, and the protocol for random numbers. */
#include "loader.h"

static const struct guid TCG2 = {
  0x607f766c, 0x7455, 0x42be, {0x93, 0x0b, 0xe4, 0xd7, 0x6d, 0xb2, 0x72, 0x0f}
};
static const struct guid RNG = {
  0x3152bca5, 0xeade, 0x433d, {0x86, 0x2e, 0xc0, 0x1c, 0xdc, 0x29, 0x1f, 0x44}
};

/* TCG EFI Protocol Specification, family 2.0, 6.4. */
struct capability {
  byte size, structure[2], protocol[2];
  dword algorithms, formats;
  byte present, padding;
  half most_command, most_response;
  dword manufacturer, banks, active;
};

struct tcg2 {
  call get_capability, get_event_log, hash_log_extend_event, submit_command, get_active_pcr_banks,
    set_active_pcr_banks, get_result_of_set_active_pcr_banks;
};

/* 6.6.3 */
struct __attribute__((packed)) event {
  dword size, header_size;
  half header_version;
  dword pcr, type;
  byte data[8];
};

struct rng {
  call get_info, get;
};

enum { FORMAT_2 = 2, FIRST = 32, SHA256 = 0xb, ALGORITHMS = 8, MOST_EVENTS = 1000, RANDOM = 64 };
enum { NO_ACTION = 3, PCR = 16, IPL = 0xd, MOST_BANKS = 8 };
enum { PCRS = 24, TEXT = 40, PLATFORM_CONFIG_FLAGS = 0xa };

/* The algorithms of the log and the lengths of their digests. */
static half algorithms[ALGORITHMS], lengths[ALGORITHMS];
static word algorithm_count;

static half get16(const byte *at)
{
  return at[0] | at[1] << 8;
}

/* TCG PC Client Platform Firmware Profile, 10.4.5.1: the first event says which digests follow. */
static const byte *first_event(const byte *at)
{
  const byte *data = at + FIRST;
  word size = get32(at + 28);
  if (get32(at) != 0 || get32(at + 4) != NO_ACTION || !same(data, "Spec ID Event03", 16)) {
    say("wrong: the event log has another first event\n");
    return 0;
  }
  algorithm_count = get32(data + 24);
  if (algorithm_count == 0 || algorithm_count > ALGORITHMS || size < 28 + 4 * algorithm_count)
    return 0;
  for (word i = 0; i < algorithm_count; i++) {
    algorithms[i] = get16(data + 28 + 4 * i);
    lengths[i] = get16(data + 30 + 4 * i);
    say("fact tpm log digest %x: %d bytes\n", (word)algorithms[i], (word)lengths[i]);
  }
  return data + size;
}

/* The event after this one (10.2.2), or 0. */
static const byte *next_event(const byte *at)
{
  word digests = get32(at + 8);
  at += 12;
  for (word i = 0; i < digests; i++) {
    word known = 0;
    while (known < algorithm_count && algorithms[known] != get16(at))
      known++;
    if (known == algorithm_count)
      return 0;
    at += 2 + lengths[known];
  }
  return digests == algorithm_count ? at + 4 + get32(at) : 0;
}

/* The event's number among those of its PCR, its type, and the name of what configures the
 * platform. */
static void print_event(const byte *at, const byte *end)
{
  static word counts[PCRS];
  static letter text[TEXT + 1];
  word pcr = get32(at), type = get32(at + 4), length = 0, size;
  /* The event is the end of the entry. */
  const byte *data = at + 12;
  for (word i = 0; i < algorithm_count; i++)
    data += 2 + lengths[i];
  size = get32(data);
  data += 4;
  for (word i = 0; type == PLATFORM_CONFIG_FLAGS && i < size && length < TEXT; i++)
    if (data[i] >= ' ' && data[i] < 127)
      text[length++] = data[i];
  text[length] = 0;
  if (pcr >= PCRS || data + size != end)
    say("wrong: an event of PCR %d has %d bytes\n", pcr, size);
  else
    say("fact tpm PCR %d, event %d: type %x %w\n", pcr, ++counts[pcr], type, text);
}

/* Reads the log to its end and prints each event; returns their number. */
static word events(struct tcg2 *tcg, int aloud)
{
  word start = 0, last = 0, count = 1;
  byte cut = 0;
  word status = tcg->get_event_log(tcg, (word)FORMAT_2, &start, &last, &cut);
  const byte *at = status == 0 && start != 0 ? first_event((const byte *)start) : 0;
  if (aloud)
    say("fact tpm log: %e, cut %d\n", status, (word)cut);
  for (const byte *here = (const byte *)start; at != 0 && here != (const byte *)last; count++) {
    here = at;
    at = count < MOST_EVENTS ? next_event(at) : 0;
    if (aloud && at != 0)
      print_event(here, at);
  }
  if (at == 0)
    say("wrong: the event log cannot be read to its end\n");
  return count;
}

/* TPM2_PCR_Read of one PCR of the bank SHA-256 (TPM 2.0, part 3, 22.4). */
static void read_pcr(struct tcg2 *tcg, word number)
{
  byte command[] = {0x80, 1, 0, 0, 0, 20, 0, 0, 1, 0x7e, 0, 0, 0, 1, 0, SHA256, 3, 0, 0, 0};
  static byte answer[256];
  command[17 + number / 8] = 1 << number % 8;
  word status = tcg->submit_command(tcg, (word)sizeof command, command, (word)sizeof answer,
    answer);
  say("fact tpm PCR %d: %e, response %x, hash %x\n", number, status,
    (word)(answer[6] << 24 | answer[7] << 16 | answer[8] << 8 | answer[9]),
    hash(answer + 28, 34));
}

static void extend(struct tcg2 *tcg)
{
  static const byte data[] = "measured by a loader";
  struct event event = {sizeof event, 14, 1, PCR, IPL, "loader"};
  word before, status;
  before = events(tcg, 1);
  status = tcg->hash_log_extend_event(tcg, 0ull, data, (word)sizeof data, &event);
  say("fact tpm extending: %e, %d more events\n", status, events(tcg, 0) - before);
  event.size = 4;
  status = tcg->hash_log_extend_event(tcg, 0ull, data, (word)sizeof data, &event);
  say("fact tpm extending with an event too short: %e\n", status);
}

static void measured(void)
{
  struct capability all = {.size = sizeof all};
  struct tcg2 *tcg;
  dword banks = 0;
  word status = BOOT(LOCATE_PROTOCOL, &TCG2, 0ull, &tcg);
  say("fact tpm protocol: %e\n", status);
  if (status != 0)
    return;
  status = tcg->get_capability(tcg, &all);
  say("fact tpm capability: %e, structure %d.%d, protocol %d.%d, present %d\n", status,
    (word)all.structure[0], (word)all.structure[1], (word)all.protocol[0], (word)all.protocol[1],
    (word)all.present);
  say("fact tpm sizes: command %d, response %d\n", (word)all.most_command, (word)all.most_response);
  say("fact tpm algorithms: %x, formats %x, manufacturer %x, banks %d, active %x\n",
    (word)all.algorithms, (word)all.formats, (word)all.manufacturer, (word)all.banks,
    (word)all.active);
  status = tcg->get_active_pcr_banks(tcg, &banks);
  say("fact tpm active banks: %e, %x\n", status, (word)banks);
  extend(tcg);
  for (word number = 0; number < PCRS; number++)
    read_pcr(tcg, number);
}

static void random(void)
{
  static byte one[RANDOM], other[RANDOM];
  static struct guid kinds[MOST_BANKS];
  word size = sizeof kinds, status, zeros = 0;
  struct rng *rng;
  status = BOOT(LOCATE_PROTOCOL, &RNG, 0ull, &rng);
  say("fact random protocol: %e\n", status);
  if (status != 0)
    return;
  status = rng->get_info(rng, &size, kinds);
  say("fact random kinds: %e\n", status);
  for (word i = 0; status == 0 && i < size / sizeof *kinds; i++)
    say("fact random kind %d: %g\n", i, &kinds[i]);
  status = rng->get(rng, 0ull, (word)sizeof one, one);
  say("fact random bytes: %e, again %e\n", status, rng->get(rng, 0ull, (word)sizeof other, other));
  for (word i = 0; i < RANDOM; i++)
    zeros += one[i] == 0;
  if (zeros > RANDOM / 4 || same(one, other, RANDOM))
    say("wrong: the random bytes are not random\n");
}

void tpm(void)
{
  measured();
  random();
}

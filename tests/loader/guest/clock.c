/* The clock of the firmware: read, set over the ends of minutes and years,
 * and refused. */
#include "loader.h"

enum { UNSPECIFIED = 0x7ff };

static word get(struct time *time)
{
  static byte capabilities[16];
  return RUNTIME(GET_TIME, time, capabilities);
}

static word set(const struct time *time)
{
  return RUNTIME(SET_TIME, time);
}

/* Waits for the next second, and returns the cycles until then. */
static word next_second(struct time *time)
{
  struct time first;
  word start;
  get(&first);
  do
    get(time);
  while (time->second == first.second);
  start = cycles();
  first = *time;
  do
    get(time);
  while (time->second == first.second);
  return cycles() - start;
}

void clock_reads(const char *when)
{
  struct time time;
  word status = get(&time), passed;
  say("fact clock %s: %e, zone %d, daylight %d\n", when, status, (word)time.zone,
    (word)time.daylight);
  say("time %d-%d-%d %d:%d:%d\n", (word)time.year, (word)time.month, (word)time.day,
    (word)time.hour, (word)time.minute, (word)time.second);
  passed = next_second(&time);
  say("note a second has %d cycles\n", passed);
  say("fact clock %s without a place for the time: %e\n", when, get(0));
}

/* Sets the last second before something, and reads what follows. */
static void rolls_over(const char *what, struct time time)
{
  struct time now;
  word status = set(&time);
  do
    get(&now);
  while (now.second == time.second);
  say("fact clock set to the end of %s: %e, then %d-%d-%d %d:%d:%d\n", what, status,
    (word)now.year, (word)now.month, (word)now.day, (word)now.hour, (word)now.minute,
    (word)now.second);
}

static void refuses(const char *what, struct time time)
{
  say("fact clock set to %s: %e\n", what, set(&time));
}

void clock_sets(void)
{
  struct time before, wake;
  byte enabled = 0, pending = 0;
  const struct time year = {2031, 12, 31, 23, 59, 59, 0, 0, UNSPECIFIED, 0, 0};
  const struct time leap = {2028, 2, 28, 23, 59, 59, 0, 0, UNSPECIFIED, 0, 0};
  const struct time zone = {2027, 6, 1, 12, 0, 0, 0, 0, 60, 1, 0};
  struct time other = zone;
  word status;
  get(&before);
  rolls_over("a year", year);
  rolls_over("a 28th of February in a leap year", leap);
  refuses("a place east of Greenwich", zone);
  get(&other);
  say("fact clock there: zone %d, daylight %d\n", (word)other.zone, (word)other.daylight);
  other = zone;
  other.month = 13;
  refuses("a thirteenth month", other);
  other = zone;
  other.month = 2, other.day = 30;
  refuses("a 30th of February", other);
  other = zone;
  other.hour = 24;
  refuses("an hour 24", other);
  status = RUNTIME(GET_WAKEUP_TIME, &enabled, &pending, &wake);
  say("fact clock wake-up: %e, enabled %d, pending %d\n", status, (word)enabled, (word)pending);
  wake = zone;
  wake.hour = 13;
  status = RUNTIME(SET_WAKEUP_TIME, 1ull, &wake);
  say("fact clock wake-up in an hour: %e\n", status);
  status = RUNTIME(SET_WAKEUP_TIME, 0ull, 0ull);
  say("fact clock wake-up no more: %e\n", status);
  say("fact clock set back: %e\n", set(&before));
}

/* Checks of vioserial: a port with a name. At the other end is `port`, which obeys frames. */
#include "kmdf.h"

#define NAME "org.qemu.guest_agent.0"
enum {
    LIMIT = 60000000,
    MOMENT = 200000,
    WRITES = 240,
    AT_ONCE = 30,
    MARGIN = 64,
    LARGEST = 300000
};
enum { INFORMATION = 0x222002 };
/* Frames: see `port`. */
enum {
    MAGIC = 0x56524457,
    BLOCKS_COUNT = 512,
    LEAST = 32,
    SPREAD = 6000,
    LONGEST = LEAST + SPREAD
};
enum { ECHO = 1, SINK, SOURCE, LEAVE, REST, BLOCKS, END };
/* VIRTIO 1.3, 5.3.6.2. */
enum { DEVICE_READY, PORT_ADD, PORT_REMOVE, PORT_READY };
enum { CONSOLE_PORT = 4, RESIZE, PORT_OPEN, PORT_NAME };
enum { CONTROL_TO_GUEST = 2, CONTROL_FROM_GUEST = 3, DATA_TO_GUEST = 4, MAX_MESSAGES_SEEN = 256 };

/* The control messages, as they are in the rings. */
typedef struct {
    u32 port;
    u16 event, value;
    char name[64];
} ControlMessage;
static struct {
    ControlMessage messages[MAX_MESSAGES_SEEN];
    u32 lengths[MAX_MESSAGES_SEEN], count;
} sent, received;
static u64 bytes_to_guest;

static void watch(u32 queue, const u8 *bytes, u32 length)
{
    bytes_to_guest += queue == DATA_TO_GUEST ? length : 0;
    if (queue != CONTROL_TO_GUEST && queue != CONTROL_FROM_GUEST)
        return;
    __typeof__(sent) *to = queue == CONTROL_FROM_GUEST ? &sent : &received;
    if (to->count == MAX_MESSAGES_SEEN)
        return;
    ControlMessage *message = &to->messages[to->count];
    memset(message, 0, sizeof *message);
    memcpy(message, bytes, length < sizeof *message - 1 ? length : sizeof *message - 1);
    to->lengths[to->count++] = length;
}

static int is_message(u32 number, u32 port, u32 event, u32 value, u32 length)
{
    const ControlMessage *it = &received.messages[number];
    return number < received.count && it->port == port && it->event == event &&
           it->value == value && received.lengths[number] == length;
}

static int is_name(const char *text)
{
    return strlen(text) == sizeof NAME - 1 && !memcmp(text, NAME, sizeof NAME);
}

static int was_sent(u32 number, u32 port, u32 event, u32 value)
{
    const ControlMessage *it = &sent.messages[number];
    return number < sent.count && it->port == port && it->event == event && it->value == value &&
           sent.lengths[number] == 8;
}

/* The port, and requests to it. */

static Device *port;
static File *file;
static Request *reader, *asker, *writers[WRITES];
static u8 *read_buffer, *data, *answer;
typedef struct {
    u32 id;
    u8 full, host, guest;
    char name[129];
} Information;
static Information information;

static int is_done(void *request)
{
    return ((Request *)request)->state == DONE;
}

static int never(void *)
{
    return 0;
}

/* Asks the driver for its view of the port. */
static NTSTATUS ask(void)
{
    memset(&information, 0, sizeof information);
    kmdf_control(port, asker, INFORMATION, (u8 *)&information, sizeof information);
    wait_until(is_done, asker, LIMIT);
    return asker->status;
}

static int host_is(void *connected)
{
    ask();
    return information.host == *(int *)connected;
}

static int wait_for_host(int connected)
{
    return wait_until(host_is, &connected, LIMIT);
}

/* The bytes that both sides know: `pattern` in `port`. The seed is the state at first. */
static u8 pattern(u32 *state)
{
    *state = *state * 1103515245u + 12345u;
    return *state >> 16;
}

static u32 wrong_bytes(const u8 *bytes, u32 seed, u32 length)
{
    u32 wrong = 0, state = seed * 2654435761u;
    for (u32 i = 0; i < length; i++)
        wrong += bytes[i] != pattern(&state);
    return wrong;
}

static void fill(u8 *to, u32 seed, u32 length)
{
    u32 state = seed * 2654435761u;
    for (u32 i = 0; i < length; i++)
        to[i] = pattern(&state);
}

/* Writes in pieces of up to `largest` bytes, many at once; returns the number of failed ones. */
static u32 write_all(u8 *bytes, u32 length, u32 largest)
{
    u32 failed = 0, count;
    for (u32 at = 0; at < length;) {
        for (count = 0; count < AT_ONCE && at < length; count++) {
            u32 piece = 1 + random_number() % largest;
            if (largest == LARGEST || piece > length - at)
                piece = length - at;
            kmdf_write(port, writers[count], bytes + at, piece);
            at += piece;
        }
        for (u32 i = 0; i < count; i++) {
            Request *it = writers[i];
            failed += !wait_until(is_done, it, LIMIT) || it->status != STATUS_SUCCESS ||
                      it->information != it->length || it->completions != 1;
        }
    }
    return failed;
}

/* A reader gets what is there: at least a byte. Those beside them must stay. */
static u32 read_some(u8 *to, u32 length)
{
    kmdf_read(port, reader, read_buffer + MARGIN, length);
    if (!wait_until(is_done, reader, LIMIT) || reader->status != STATUS_SUCCESS ||
        !reader->information || reader->information > length)
        return 0;
    memcpy(to, read_buffer + MARGIN, reader->information);
    return reader->information;
}

static u32 strays(u32 got)
{
    u32 count = 0;
    for (u32 i = 0; i < LARGEST + 2 * MARGIN; i++)
        count += (i < MARGIN || i >= MARGIN + got) && read_buffer[i] != 0x5a;
    memset(read_buffer, 0x5a, LARGEST + 2 * MARGIN);
    return count;
}

static u32 read_all(u8 *to, u32 length, u32 largest)
{
    u32 at = 0, strayed = 0;
    while (at < length) {
        u32 piece = 1 + random_number() % largest;
        u32 got = read_some(to + at, piece < length - at ? piece : length - at);
        if (!got)
            break;
        strayed += strays(got);
        at += got;
    }
    return strayed ? 0 : at;
}

static u32 frame(u32 verb, u32 first, u32 second)
{
    u32 words[] = {MAGIC, verb, first, second};
    return write_all((u8 *)words, sizeof words, LARGEST);
}

static u32 echo(u32 length, u32 largest)
{
    u32 seed = random_number();
    fill(data, seed, length);
    memset(answer, 0, length);
    u32 failed = frame(ECHO, length, 0) + write_all(data, length, largest);
    u32 got = failed ? 0 : read_all(answer, length, largest);
    return failed || got != length ? 1 : wrong_bytes(answer, seed, length);
}

/* Forgets what the host's end has sent before, and lets it connect again. */
static int start_afresh(void)
{
    for (;;) {
        kmdf_read(port, reader, read_buffer + MARGIN, 4096);
        if (!wait_until(is_done, reader, MOMENT))
            break;
    }
    kmdf_cancel(reader);
    strays(4096);
    return !frame(LEAVE, 300, 0) && wait_for_host(0) && wait_for_host(1);
}

/* The checks. */

static int is_described(void *)
{
    port = child(0);
    return port && received.count >= 3;
}

static void start(void)
{
    int found = wait_until(is_described, NULL, LIMIT);
    u32 length = 8 + sizeof NAME - 1, given = received.lengths[1];
    /* The name ends with a zero, as QEMU sends it: see README.md. */
    int name = given == length + 1 && is_name(received.messages[1].name);
    int got = is_message(0, 1, PORT_ADD, 1, 8) && is_message(1, 1, PORT_NAME, 1, given) &&
              is_message(2, 1, PORT_OPEN, 1, 8) && received.count == 3;
    int told =
        was_sent(0, ~0u, DEVICE_READY, 1) && was_sent(1, 1, PORT_READY, 1) && sent.count == 2;
    check(found && name && got && told, "messages", "received=%u sent=%u name=%s of %u bytes",
          received.count, sent.count, received.messages[1].name, given - 8);
    if (!found)
        return;
    work_items_finish();
    int prefix = sizeof "\\DosDevices\\" - 1;
    check(!memcmp(port->link, "\\DosDevices\\", prefix) && is_name(port->link + prefix), "link",
          "%s", port->link);
    NTSTATUS status = ask();
    check(status == STATUS_SUCCESS && information.id == 1 && information.host &&
              !information.guest && !information.full && is_name(information.name),
          "information", "status=%x id=%u host=%u guest=%u name=%s", status, information.id,
          information.host, information.guest, information.name);
}

static int open_port(void)
{
    NTSTATUS status;
    u32 before = sent.count;
    file = file_open(port, &status);
    ask();
    return file && information.guest && was_sent(before, 1, PORT_OPEN, 1);
}

static void open(void)
{
    NTSTATUS status = 0;
    int opened = open_port();
    File *second = opened ? file_open(port, &status) : NULL;
    check(opened && !second && status == STATUS_OBJECT_NAME_EXISTS, "open", "status=%x sent=%u",
          status, sent.count);
}

static void both_ways(void)
{
    static const u32 LENGTHS[] = {1, 2, 3, 7, 63, 511, 512, 4095, 4096, 4097, 8191, 12289, 65537};
    u32 wrong = 0, count = sizeof LENGTHS / sizeof *LENGTHS;
    for (u32 i = 0; i < count && !wrong; i++)
        wrong += echo(LENGTHS[i], LARGEST) + echo(LENGTHS[i], 1 + LENGTHS[i] / 3);
    check(!wrong, "echo", "lengths=%u wrong=%u", count, wrong);

    u32 answers[4] = {0};
    fill(data, 77, LARGEST);
    u32 failed = frame(SINK, LARGEST, 77) + write_all(data, LARGEST, 5000);
    read_all((u8 *)answers, sizeof answers, 16);
    check(!failed && answers[0] == MAGIC && answers[2] == 1 && answers[3] == LARGEST, "sink",
          "failed=%u equal=%u bytes=%u", failed, answers[2], answers[3]);

    frame(SOURCE, LARGEST, 78);
    u32 got = read_all(answer, LARGEST, 5000);
    wrong = wrong_bytes(answer, 78, LARGEST);
    check(got == LARGEST && !wrong, "source", "bytes=%u wrong=%u", got, wrong);

    /* The ring is full long before the reader begins: the rest waits in the host's socket. */
    frame(SOURCE, LARGEST, 79);
    frame(SOURCE, LARGEST, 80);
    frame(SOURCE, LARGEST, 81);
    wait_until(never, NULL, MOMENT);
    for (wrong = 0, got = 0; got < 3; got++)
        wrong +=
            read_all(answer, LARGEST, LARGEST) != LARGEST || wrong_bytes(answer, 79 + got, LARGEST);
    check(!wrong, "flood", "wrong=%u", wrong);
}

static void waiting(void)
{
    kmdf_read(port, reader, read_buffer + MARGIN, 100);
    wait_until(never, NULL, MOMENT / 4);
    int waits = reader->state == OWNED;
    frame(SOURCE, 1, 90);
    int good = wait_until(is_done, reader, LIMIT) && reader->information == 1 &&
               !wrong_bytes(read_buffer + MARGIN, 90, 1);
    strays(1);
    kmdf_read(port, reader, read_buffer + MARGIN, 100);
    kmdf_cancel(reader);
    check(waits && good && reader->status == STATUS_CANCELLED && reader->completions == 1 &&
              !echo(100, 50),
          "wait", "waits=%u answered=%u status=%x", waits, good, reader->status);
}

/* The host's program leaves and comes back. */
static void host_leaves(void)
{
    u32 before = received.count, told = notifications;
    frame(LEAVE, 1000, 0);
    int left = wait_for_host(0);
    kmdf_write(port, writers[0], data, 100);
    int refused = wait_until(is_done, writers[0], LIMIT) && writers[0]->status == STATUS_CANT_WAIT;
    kmdf_read(port, reader, read_buffer + MARGIN, 100);
    refused &= wait_until(is_done, reader, LIMIT) && !NT_SUCCESS(reader->status);
    int back = wait_for_host(1);
    work_items_finish();
    check(left && refused && back && is_message(before, 1, PORT_OPEN, 0, 8) &&
              is_message(before + 1, 1, PORT_OPEN, 1, 8) && received.count == before + 2 &&
              notifications == told + 2 && !echo(1000, 300),
          "host", "left=%u refused=%u back=%u messages=%u notifications=%u", left, refused, back,
          received.count - before, notifications - told);
}

/* Blocks, of which the host's end says which arrived. */

static u32 next_block;
static u8 arrived[BLOCKS_COUNT / 8], succeeded[BLOCKS_COUNT / 8];

static u32 block_length(u32 number)
{
    return LEAST + (u32)((number * 2654435761ull) >> 16) % SPREAD;
}

static void begin_blocks(u32 seed)
{
    next_block = 0;
    memset(succeeded, 0, sizeof succeeded);
    frame(BLOCKS, seed, 0);
}

/* Each writer has a part of `data`. */
static void write_blocks(u32 seed, u32 from, u32 to)
{
    for (u32 i = from; i < to; i++) {
        u8 *bytes = data + i * 8192;
        u32 number = (next_block + i) % BLOCKS_COUNT;
        fill(bytes, seed + number, block_length(number));
        kmdf_write(port, writers[i], bytes, block_length(number));
    }
}

/* Waits for the blocks; returns the number of those that were refused, or ~0. */
static u32 finish_blocks(u32 count)
{
    u32 refused = 0, bad = 0;
    for (u32 i = 0; i < count; i++) {
        Request *it = writers[i];
        u32 number = (next_block + i) % BLOCKS_COUNT;
        bad += !wait_until(is_done, it, LIMIT) || it->completions != 1;
        if (it->status == STATUS_SUCCESS)
            succeeded[number / 8] |= 1 << number % 8;
        else
            refused++;
        bad += it->status != STATUS_SUCCESS && it->status != STATUS_CANT_WAIT &&
               it->status != STATUS_INSUFFICIENT_RESOURCES;
    }
    next_block += count;
    return bad ? ~0u : refused;
}

/* Every block whose write succeeded has arrived whole. */
static void end_blocks(const char *name, u32 seed, const char *failed, u32 refused, u32 most_cut)
{
    u32 end[] = {MAGIC, END, seed, MAGIC}, counts[4] = {0}, lost = 0, extra = 0;
    write_all((u8 *)end, sizeof end, LARGEST);
    int got = read_all((u8 *)counts, sizeof counts, 16) == sizeof counts &&
              read_all(arrived, sizeof arrived, 64) == sizeof arrived;
    for (u32 i = 0; i < BLOCKS_COUNT; i++) {
        lost += (succeeded[i / 8] & ~arrived[i / 8]) >> i % 8 & 1;
        extra += (arrived[i / 8] & ~succeeded[i / 8]) >> i % 8 & 1;
    }
    check(!failed && got && refused != ~0u && !lost && counts[2] <= most_cut && !counts[3] &&
              (most_cut || (!extra && !counts[1])),
          name, "%s blocks=%u refused=%u whole=%u again=%u cut=%u strange=%u lost=%u extra=%u",
          failed ? failed : "done", next_block, refused, counts[0], counts[1], counts[2], counts[3],
          lost, extra);
}

/* The host does not read: the ring fills up, and further writes are refused at once. The device
 * first takes what the host's socket has room for, which takes a moment on a busy host. */
static void full(void)
{
    u32 refused = 0, seed = 1000;
    frame(REST, 5000, 0);
    begin_blocks(seed);
    write_blocks(seed, 0, WRITES / 2);
    wait_until(never, NULL, 5 * MOMENT);
    write_blocks(seed, WRITES / 2, WRITES);
    for (u32 i = 0; i < WRITES; i++)
        refused += writers[i]->state == DONE && writers[i]->status != STATUS_SUCCESS;
    ask();
    const char *failed = !refused || !information.full ? "the ring was not full" : NULL;
    end_blocks("full", seed, failed, finish_blocks(WRITES), 0);
}

static void close_and_open(void)
{
    u32 before = sent.count;
    frame(SOURCE, 100000, 91);
    wait_until(never, NULL, MOMENT / 2);
    file_close(file);
    file = NULL;
    ask();
    int closed = was_sent(before, 1, PORT_OPEN, 0) && !information.guest;
    int opened = open_port();
    check(closed && opened && start_afresh() && !echo(5000, 700), "close", "closed=%u opened=%u",
          closed, opened);
}

/* What the host sends to a closed port waits in the host's socket until a program opens it. */
static void closed(void)
{
    enum { PAUSE = 1000, LENGTH = 100000, SEED = 92 };
    frame(REST, PAUSE, 0);
    frame(SOURCE, LENGTH, SEED);
    file_close(file);
    file = NULL;
    ask();
    u64 before = bytes_to_guest;
    wait_until(never, NULL, PAUSE * 1000 + MOMENT);
    u64 early = bytes_to_guest - before;
    int opened = open_port();
    u32 got = opened ? read_all(answer, LENGTH, 5000) : 0;
    u32 wrong = wrong_bytes(answer, SEED, got);
    check(!early && got == LENGTH && !wrong, "closed", "early=%llu bytes=%u wrong=%u", early, got,
          wrong);
}

/* Sleeps with blocks on their way and a reader that waits. A block may be sent again afterwards,
 * and the device may have sent a part of one. */
static void power(void)
{
    enum { CYCLES = 10 };
    const char *failed = NULL;
    u32 refused = 0, cycles = 0, seed = 2000;
    begin_blocks(seed);
    kmdf_read(port, reader, read_buffer + MARGIN, 16);
    for (; cycles < CYCLES && !failed && refused != ~0u; cycles++) {
        write_blocks(seed, 0, AT_ONCE);
        for (u32 i = random_number() % 6; i; i--)
            run_everything();
        failed = device_sleep();
        failed = failed ? failed : device_wake();
        u32 now = failed ? 0 : finish_blocks(AT_ONCE);
        refused = now == ~0u ? now : refused + now;
        if (!failed && !wait_for_host(1))
            failed = "no PORT_OPEN after it";
    }
    int waits = reader->state == OWNED;
    kmdf_cancel(reader);
    end_blocks("power", seed, failed ? failed : waits ? NULL : "the reader", refused, cycles);
    check(!failed && !echo(LARGEST, 9000), "power.after", "cycles=%u", cycles);
}

/* Each processor writes its own blocks, a few at once, while the first one may put the device to
 * sleep. */

enum { OWN_BLOCKS = BLOCKS_COUNT / PROCESSORS, OWN_AT_ONCE = 8, SLEEPS = 6 };
static u32 share_bad, share_refused, share_seed;
static int sleeps;
static const char *sleep_problem;

static void write_own(u32 me, u32 first)
{
    for (u32 i = 0; i < OWN_AT_ONCE; i++) {
        u8 *bytes = data + (me * OWN_AT_ONCE + i) * 8192;
        fill(bytes, share_seed + first + i, block_length(first + i));
        kmdf_write(port, writers[me * OWN_AT_ONCE + i], bytes, block_length(first + i));
    }
    if (!kmdf_await(writers + me * OWN_AT_ONCE, OWN_AT_ONCE, LIMIT)) {
        COUNT(share_bad);
        return;
    }
    for (u32 i = 0; i < OWN_AT_ONCE; i++) {
        Request *it = writers[me * OWN_AT_ONCE + i];
        int good = it->status == STATUS_SUCCESS;
        succeeded[(first + i) / 8] |= good << i % 8;
        count_if(!good, &share_refused);
        count_if(it->completions != 1 || (!good && it->status != STATUS_CANT_WAIT &&
                                          it->status != STATUS_INSUFFICIENT_RESOURCES),
                 &share_bad);
    }
}

static void write_share(void)
{
    u32 me = this_processor();
    for (u32 i = 0; sleeps && !me && i < SLEEPS && !sleep_problem; i++) {
        wait_until(never, NULL, random_number() % 5000);
        sleep_problem = device_sleep();
        sleep_problem = sleep_problem ? sleep_problem : device_wake();
    }
    for (u32 at = 0; at < OWN_BLOCKS && !share_bad; at += OWN_AT_ONCE)
        write_own(me, me * OWN_BLOCKS + at);
}

static void together(const char *name, int with_sleeps)
{
    u32 processors = running->interrupts.processors;
    sleeps = with_sleeps;
    sleep_problem = NULL;
    share_bad = share_refused = 0;
    share_seed = 3000 + 1000 * sleeps;
    begin_blocks(share_seed);
    processors_run(processors, write_share);
    next_block = processors * OWN_BLOCKS;
    if (!sleep_problem && !wait_for_host(1))
        sleep_problem = "no PORT_OPEN after it";
    end_blocks(name, share_seed, sleep_problem, share_bad ? ~0u : share_refused,
               sleeps ? SLEEPS * OWN_AT_ONCE * PROCESSORS : 0);
}

/* Writes that nobody reads, and data that nobody has read, are under way at the removal. The first
 * removal is orderly: Windows closes the file before. */
static void leave(void)
{
    static u32 rounds;
    frame(SOURCE, LARGEST, 95);
    frame(REST, 300, 0);
    kmdf_read(port, reader, read_buffer + MARGIN, 1);
    if (rounds++ % 2 == 0) {
        wait_until(is_done, reader, LIMIT);
        file_close(file);
        return;
    }
    memset(data, 0, AT_ONCE * 8192);
    for (u32 i = 0; i < AT_ONCE; i++)
        kmdf_write(port, writers[i], data + i * 8192, 8000);
}

/* Before the driver's start, so that all messages are seen. */
void kmdf_prepare_serial(void)
{
    port = NULL;
    file = NULL;
    sent.count = received.count = 0;
    used_watch(watch);
    used_may_be_shorter(1);
    reader = kmdf_request();
    asker = kmdf_request();
    for (u32 i = 0; i < WRITES; i++)
        writers[i] = kmdf_request();
    if (!data) {
        read_buffer = allocate(LARGEST + 2 * MARGIN, 16);
        data = allocate(WRITES * 8192, 16);
        answer = allocate(LARGEST, 16);
    }
    memset(read_buffer, 0x5a, LARGEST + 2 * MARGIN);
}

void kmdf_check_serial(void)
{
    start();
    if (!port)
        return;
    open();
    if (!file)
        return;
    check(start_afresh(), "afresh", "received=%u", received.count);
    both_ways();
    waiting();
    host_leaves();
    full();
    close_and_open();
    closed();
    power();
    if (running->interrupts.processors > 1) {
        together("together", 0);
        together("together.power", 1);
    }
    leave();
}

/* Frames that go to the peer and come back, and frames that it sends. */
#include "traffic.h"

const u8 PEER[ADDRESS] = {2, 0, 0, 0, 0, 1}, REPEATER[ADDRESS] = {2, 0, 0, 0, 0, 2};
const u8 SWAPPER[ADDRESS] = {2, 0, 0, 0, 0, 3}, CARRIER[ADDRESS] = {2, 0, 0, 0, 0, 4};
const u8 EVERYBODY[ADDRESS] = {0xff, 0xff, 0xff, 0xff, 0xff, 0xff};
/* The test gives this address to the device. */
const u8 OWN[ADDRESS] = {0x52, 0x54, 0, 0x77, 0x69, 0x6e};
enum { NUMBER_AT = HEADER, STAMP_AT = HEADER + 4, ROOM = 68 << 10 };

Arrived arrived;
u8 last_other[2048];
u32 last_other_length;
static struct {
    u32 stamp, length;
    int expected, seen;
} frames[MAX_FRAMES];
static u32 first_number, next_number, missing;

static u32 get4(const u8 *at)
{
    return at[0] | at[1] << 8 | at[2] << 16 | (u32)at[3] << 24;
}

static void put4(u8 *at, u32 value)
{
    for (u32 i = 0; i < 4; i++)
        at[i] = value >> 8 * i;
}

static u8 content(u32 stamp, u32 length, u32 at)
{
    u32 value = (stamp + at / 4) * 2654435761u ^ length * 40503u;
    return (value ^ value >> 15) >> 8 * (at % 4);
}

void frame_make(u8 *to, const u8 *destination, u32 number, u32 stamp, u32 length)
{
    memcpy(to, destination, ADDRESS);
    memcpy(to + ADDRESS, OWN, ADDRESS);
    to[12] = TEST_TYPE >> 8;
    to[13] = TEST_TYPE & 0xff;
    put4(to + NUMBER_AT, number);
    put4(to + STAMP_AT, stamp);
    for (u32 at = STAMPED; at < length; at++)
        to[at] = content(stamp, length, at);
}

void traffic_forget(void)
{
    spin_lock(&delivery_lock);
    memset(&arrived, 0, sizeof arrived);
    memset(frames, 0, sizeof frames);
    first_number = next_number;
    missing = 0;
    spin_unlock(&delivery_lock);
}

void traffic_expect(u32 first, u32 count, u32 stamp, u32 length)
{
    spin_lock(&delivery_lock);
    for (u32 i = 0; i < count; i++) {
        u32 slot = (first + i) % MAX_FRAMES;
        missing += !frames[slot].expected;
        frames[slot].expected = 1;
        frames[slot].seen = 0;
        frames[slot].stamp = stamp;
        frames[slot].length = length;
    }
    spin_unlock(&delivery_lock);
}

u32 traffic_missing(void)
{
    return missing;
}

/* A short frame arrives with padding. */
static int is_right(const u8 *frame, u32 length, u32 stamp, u32 wanted)
{
    if (get4(frame + STAMP_AT) != stamp || length != (wanted < SHORTEST ? SHORTEST : wanted))
        return 0;
    for (u32 at = STAMPED; at < wanted; at++)
        if (frame[at] != content(stamp, wanted, at))
            return 0;
    return 1;
}

static void arrive(PNET_BUFFER_LIST, const u8 *frame, u32 length)
{
    u32 type = length < HEADER ? 0 : frame[12] << 8 | frame[13];
    if (type != TEST_TYPE || length < STAMPED) {
        arrived.reports += type == REPORT_TYPE;
        arrived.others += type != REPORT_TYPE;
        last_other_length = length < sizeof last_other ? length : sizeof last_other;
        memcpy(last_other, frame, last_other_length);
        return;
    }
    u32 number = get4(frame + NUMBER_AT), slot = number % MAX_FRAMES;
    arrived.frames++;
    if (number - first_number >= MAX_FRAMES || !frames[slot].expected) {
        arrived.unknown++;
    } else if (frames[slot].seen) {
        arrived.twice++;
    } else {
        frames[slot].seen = 1;
        missing--;
        arrived.wrong += !is_right(frame, length, frames[slot].stamp, frames[slot].length);
    }
}

static int all_arrived(void *)
{
    return !missing;
}

int traffic_arrived(u32 milliseconds)
{
    return wait_until(all_arrived, NULL, milliseconds * 1000ull);
}

void send_frame(const u8 *frame, u32 length)
{
    static const Pieces WHOLE = {{0}, 0};
    on_receive = arrive;
    packets_send(packet_new(frame, length, &WHOLE));
}

void echo(u32 length, const Pieces *pieces)
{
    static u8 frame[ROOM];
    u32 stamp = random_number();
    on_receive = arrive;
    frame_make(frame, PEER, next_number, stamp, length);
    traffic_expect(next_number++, 1, stamp, length);
    packets_send(packet_new(frame, length, pieces));
}

void send_flood(const u8 *destination, u32 count, u32 length)
{
    static u8 frame[ROOM];
    enum { INNER = HEADER + 2 };
    u32 stamp = random_number();
    memcpy(frame, REPEATER, ADDRESS);
    memcpy(frame + ADDRESS, OWN, ADDRESS);
    frame[12] = TEST_TYPE >> 8;
    frame[13] = TEST_TYPE & 0xff;
    frame[HEADER] = count;
    frame[HEADER + 1] = count >> 8;
    frame_make(frame + INNER, destination, next_number, stamp, length);
    memcpy(frame + INNER + ADDRESS, PEER, ADDRESS);
    traffic_expect(next_number, count, stamp, length);
    next_number += count;
    send_frame(frame, INNER + length);
}

static int is_seen(void *slot)
{
    return frames[*(u32 *)slot].seen;
}

/* An echo, which the peer handles after everything else. */
static int barrier(void)
{
    static const Pieces WHOLE = {{0}, 0};
    u32 slot = next_number % MAX_FRAMES;
    echo(SHORTEST, &WHOLE);
    return wait_until(is_seen, &slot, 30000000);
}

int is_delivered(const u8 *destination)
{
    traffic_forget();
    send_flood(destination, 1, 100);
    int good = barrier();
    u32 count = arrived.frames;
    traffic_forget();
    return good && count == 2;
}

int traffic_settle(void)
{
    int good = packets_completed() && barrier() && packets_completed();
    traffic_forget();
    memset(&sent, 0, sizeof sent);
    return good;
}

void check_traffic(const char *name, u32 milliseconds)
{
    int complete = packets_completed() & traffic_arrived(milliseconds);
    Arrived *it = &arrived;
    int good = complete && !it->wrong && !it->twice && !it->unknown && !it->others && !sent.failed;
    check(good, name,
          "arrived=%u missing=%u wrong=%u twice=%u unknown=%u others=%u sent=%u completed=%u "
          "failed=%u resources=%u",
          it->frames, missing, it->wrong, it->twice, it->unknown, it->others, sent.sent,
          sent.completed, sent.failed, received.with_resources);
    traffic_forget();
    memset(&sent, 0, sizeof sent);
    received.with_resources = received.lists = 0;
}

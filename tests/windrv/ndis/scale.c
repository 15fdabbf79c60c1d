/* Checks of receive side scaling: every processor sends packets of its connections, and takes the
 * packets that are for it. The peer answers from the other end of each connection. */
#include "scale.h"

enum {
    SECONDS = 1000000,
    LARGEST = 1400,
    NUMBER = 0,
    STAMP = 4,
    CONTENT = 8,
    SHORTEST_PAYLOAD = 16
};
enum { FIRST_PORT = 2000, PEER_PORT = 80, LOSS_MICROSECONDS = 20000, SETTLE_MICROSECONDS = 20000 };
enum { FOLLOW_UP_MICROSECONDS = 200000, FOLLOW_UPS = 20 };
enum { IPV4_TYPE = 0x0800, IPV6_TYPE = 0x86dd, UDP_PROTOCOL = 17 };

typedef struct {
    u32 stamp, payload, connection;
    u32 turn; /* of the table, when it was sent */
    int in_flight;
} Flight;
static Flight flights[PROCESSORS][SHARE];
/* Of each processor: packets that have no answer yet. */
static volatile u32 in_flight[PROCESSORS];
static u32 last_number[PROCESSORS * CONNECTIONS];
/* The number of the load, which begins the stamp of each of its packets. */
static u32 load_number;
Landed landed;
Load load;

static const Flow *flow_of(u32 connection)
{
    return &FLOWS[connection % FLOW_KINDS];
}

static u32 hash_of(u32 connection)
{
    return hash_make(flow_of(connection), PEER_PORT, FIRST_PORT + connection);
}

static void put4(u8 *at, u32 value)
{
    put2(at, value >> 16);
    put2(at + 2, value & 0xffff);
}

static u32 get4(const u8 *at)
{
    return (u32)at[0] << 24 | at[1] << 16 | at[2] << 8 | at[3];
}

static u8 content(u32 stamp, u32 at)
{
    return (stamp + at / 4) * 2654435761u >> 8 * (at % 4);
}

u32 load_connection_to(u32 processor)
{
    u32 connection = 0;
    while (connection < PROCESSORS * CONNECTIONS - 1 &&
           !table_gives(table_turn(), hash_of(connection), processor))
        connection++;
    return connection;
}

/* The packet inside of a frame, whose hash chooses the pair that sends it. The peer answers the
 * packet. */
static PNET_BUFFER_LIST carry(const u8 *packet, u32 length, u32 hash)
{
    static const Pieces WHOLE = {{0}, 0};
    static u8 frame[HEADER + 2048];
    memcpy(frame, CARRIER, ADDRESS);
    memcpy(frame + ADDRESS, OWN, ADDRESS);
    put2(frame + 2 * ADDRESS, TEST_TYPE);
    memcpy(frame + HEADER, packet, length);
    PNET_BUFFER_LIST list = packet_new(frame, HEADER + length, &WHOLE);
    NET_BUFFER_LIST_SET_HASH_VALUE(list, hash);
    return list;
}

/* Sends a packet of one of this processor's connections. Its list has the hash of the answer, as
 * Windows' stack does it, so that the answer comes back on the processor's own queue; or another
 * one, so that the driver must pass the answer on to another processor. */
static void send_one(u32 me, u32 number)
{
    static const Pieces SHAPES[] = {{{0}, 0}, {{64, 2000}, 10}, {{54, 300, 1000}, 4000}};
    static u8 frames[PROCESSORS][2048];
    u8 *frame = frames[me];
    Flight *it = &flights[me][number % SHARE];
    u32 connection = me * CONNECTIONS + random_number() % CONNECTIONS;
    if (load.alone)
        connection = load.connection;
    const Flow *flow = flow_of(connection);
    u32 payload = SHORTEST_PAYLOAD + random_number() % LARGEST, at = payload_at(flow);
    u32 stamp = load_number << 24 | (random_number() & 0xffffff);
    *it = (Flight){stamp, payload, connection, table_turn(), 1};
    flow_headers(frame, flow, payload, 1);
    memcpy(frame, SWAPPER, ADDRESS);
    put2(frame + transport_at(flow), FIRST_PORT + connection);
    put4(frame + at + NUMBER, me << 16 | number);
    put4(frame + at + STAMP, it->stamp);
    for (u32 i = CONTENT; i < payload; i++)
        frame[at + i] = content(it->stamp, i);
    if (!load.offloads || load.carried)
        flow_complete(frame, flow, at + payload);
    PNET_BUFFER_LIST list;
    if (load.carried) {
        list = carry(frame, at + payload, hash_of(load_connection_to(me)));
    } else {
        list = packet_new(frame, at + payload, &SHAPES[number % 3]);
        if (load.offloads)
            flow_ask(list, flow);
        NET_BUFFER_LIST_SET_HASH_VALUE(list, hash_of(connection) + load.astray);
    }
    COUNT(in_flight[me]);
    COUNT(landed.sent);
    packets_send(list);
}

/* Whether the packet is the answer to this one. */
static int is_answer(const Flight *it, const u8 *frame, u32 length)
{
    const Flow *flow = flow_of(it->connection);
    u32 at = payload_at(flow);
    if (length != at + it->payload && (length != SHORTEST || at + it->payload > SHORTEST))
        return 0;
    const u8 *ports = frame + transport_at(flow), *payload = frame + at;
    int good = ports[0] << 8 == 0 && ports[1] == PEER_PORT &&
               (ports[2] << 8 | ports[3]) == FIRST_PORT + (int)it->connection;
    for (u32 i = CONTENT; i < it->payload; i++)
        good &= payload[i] == content(it->stamp, i);
    return good;
}

static void judge(PNET_BUFFER_LIST list, const Flight *it, u32 number)
{
    u32 me = current_processor(), hash = hash_of(it->connection),
        *last = &last_number[it->connection];
    landed.by_processor[me % PROCESSORS]++;
    if (load.scaled) {
        landed.bad_hashes += NET_BUFFER_LIST_GET_HASH_VALUE(list) != hash;
        landed.misplaced += !table_gives(it->turn, hash, me);
    }
    landed.bad_checksums += load.offloads && !flow_is_right(list, flow_of(it->connection));
    landed.disordered += number < *last;
    *last = number;
}

/* Called under the lock of deliveries. */
static void land(PNET_BUFFER_LIST list, const u8 *frame, u32 length)
{
    u32 type = frame[12] << 8 | frame[13], v6 = type == IPV6_TYPE;
    if (length < SHORTEST || memcmp(frame + ADDRESS, PEER, ADDRESS) || (!v6 && type != IPV4_TYPE)) {
        landed.others++;
        return;
    }
    u32 udp = frame[HEADER + (v6 ? 6 : 9)] == UDP_PROTOCOL;
    u32 at = payload_at(&FLOWS[2 * v6 + udp]);
    u32 number = get4(frame + at + NUMBER), sender = number >> 16, stamp = get4(frame + at + STAMP);
    /* A busy host answers what a disturbed load sent while the next one runs. */
    if (load.loses && stamp >> 24 != (load_number & 0xff)) {
        landed.late++;
        return;
    }
    Flight *it = sender < PROCESSORS ? &flights[sender][(number & 0xffff) % SHARE] : NULL;
    if (!it || stamp != it->stamp) {
        landed.unknown++;
    } else if (!it->in_flight) {
        landed.twice++;
    } else {
        it->in_flight = 0;
        landed.arrived++;
        landed.wrong += !is_answer(it, frame, length);
        judge(list, it, number & 0xffff);
        if (__atomic_fetch_sub(&in_flight[sender], 1, __ATOMIC_RELAXED) == 1 &&
            sender != this_processor())
            processor_wake(sender);
    }
}

/* What is lost in a disturbance is given up, so that others can be sent. */
static void give_up(u32 me)
{
    spin_lock(&delivery_lock);
    for (u32 i = 0; i < SHARE; i++)
        flights[me][i].in_flight = 0;
    in_flight[me] = 0;
    spin_unlock(&delivery_lock);
}

/* Takes messages and runs deferred procedures; whether there was nothing to do for too long. */
static int is_idle(u64 *since, u64 limit)
{
    allow_interrupts();
    if (ndis_poll()) {
        *since = microseconds();
        return 0;
    }
    wait_for_interrupt();
    return microseconds() - *since > limit;
}

/* How long a processor waits for its packets before it gives them up, or sends one more. */
static u64 patience(void)
{
    if (load.loses)
        return LOSS_MICROSECONDS;
    return load.follow_ups < FOLLOW_UPS ? FOLLOW_UP_MICROSECONDS : 20 * SECONDS;
}

/* The driver moves packets that it has under way from the queues of processors to others when its
 * table changes (ParaNdis_ResetRxClassification), and looks there only when more packets come. */
static int follow_up(u32 me, u32 number, u64 *since)
{
    if (load.loses || load.follow_ups >= FOLLOW_UPS)
        return 0;
    COUNT(load.follow_ups);
    send_one(me, number);
    *since = microseconds();
    return 1;
}

void load_send(void)
{
    u32 me = this_processor(), count = load.count, depth = load.alone ? 1 : DEPTH;
    u64 since = microseconds();
    if (load.alone && me != load.sender)
        return;
    for (u32 number = 0; (load.disturbs ? !load.over : number < count) || in_flight[me];) {
        while (in_flight[me] < depth && (load.disturbs ? !load.over : number < count))
            send_one(me, number++ % 0x10000);
        if (!load.disturbs && is_idle(&since, 20 * SECONDS))
            break;
        if (load.disturbs && is_idle(&since, patience()) &&
            !follow_up(me, number++ % 0x10000, &since))
            give_up(me);
    }
}

static u32 misrouted_before;

void load_begin(void)
{
    traffic_settle();
    misrouted_before = nic.interrupts.misrouted;
    /* What was passed on to other processors may arrive after the last packet. */
    wait_until(deferred_have_run, NULL, 20 * SECONDS);
    NdisMSleep(SETTLE_MICROSECONDS);
    for (u32 i = 0; i < nic.mode.processors; i++)
        give_up(i);
    memset(last_number, 0, sizeof last_number);
    memset(&landed, 0, sizeof landed);
    load_number++;
    on_receive = land;
}

static u32 shares_lost(void)
{
    u32 lost = 0;
    for (u32 i = 0; i < nic.mode.processors; i++)
        lost += in_flight[i];
    return lost;
}

/* Each processor sends and waits for its answers. All must come, to where the table says. */
int load_run(const char *name, u32 count)
{
    load.count = count;
    load_begin();
    processors_run(nic.mode.processors, load_send);
    return load_judge(name);
}

int load_judge(const char *name)
{
    Landed *it = &landed;
    u32 lost = shares_lost(), misrouted = nic.interrupts.misrouted - misrouted_before;
    int good = packets_completed() && it->arrived == it->sent && !lost && !it->wrong && !it->twice;
    good &= !it->unknown && !it->others && !it->disordered && !it->misplaced && !it->bad_hashes;
    good &= !it->bad_checksums && !misrouted && !sent.failed;
    if (name || !good)
        check(good, name ? name : "load",
              "sent=%u arrived=%u lost=%u wrong=%u twice=%u unknown=%u late=%u others=%u "
              "disordered=%u misplaced=%u hashes=%u checksums=%u misrouted=%u "
              "processors=%u/%u/%u/%u",
              it->sent, it->arrived, lost, it->wrong, it->twice, it->unknown, it->late,
              it->others, it->disordered, it->misplaced, it->bad_hashes, it->bad_checksums,
              misrouted, it->by_processor[0], it->by_processor[1], it->by_processor[2],
              it->by_processor[3]);
    memset(&sent, 0, sizeof sent);
    return good;
}

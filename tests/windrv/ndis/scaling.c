/* Checks of receive side scaling: the table, its changes, and disturbances under load. */
#include "scale.h"
#include "../include/ndis/netkvmmof.h"

enum { OID_NETKVM_DIAG = 0xff010203, OID_NETKVM_CONFIG = 0xff010202, DISTURBANCES = 4 };
enum { CHANGES = 60, CHANGE_MICROSECONDS = 3000, PAUSE_MICROSECONDS = 15000 };
/* Packets of a round that a pair only receives. */
enum { ROUNDS = 5, RECEIVED = 20 };
static u32 fired_before[MAX_MESSAGES];
static const char *problem;

static void wait_for(u64 time)
{
    u64 end = microseconds() + time;
    while (microseconds() < end) {
        allow_interrupts();
        if (!run_everything())
            wait_for_interrupt();
    }
}

static NetKvm_Diag diagnosis(void)
{
    NetKvm_Diag diag = {0};
    nic_query(OID_NETKVM_DIAG, &diag, sizeof diag, NULL);
    return diag;
}

static void mark_messages(void)
{
    memcpy(fired_before, nic.interrupts.fired, sizeof fired_before);
}

/* The number of messages of received packets, or of those that were sent, since the mark. */
static u32 messages_of(u32 queue, int receives)
{
    u32 message = MESSAGES_OF_A_PROCESSOR * queue + receives;
    return nic.interrupts.fired[message] - fired_before[message];
}

/* Every answer came in on the queue of the processor that it is for, if each has one. */
static void check_own_queues(const char *name, u32 queues)
{
    u32 silent = 0, misses = diagnosis().rss.Misses;
    mark_messages();
    load_run(name, 600);
    for (u32 i = 0; i < queues; i++)
        silent += !messages_of(i, 1);
    misses = diagnosis().rss.Misses - misses;
    check(!silent && (queues < nic.mode.processors || !misses), "rss.queues",
          "messages=%u/%u/%u/%u silent=%u misses=%u", messages_of(0, 1), messages_of(1, 1),
          messages_of(2, 1), messages_of(3, 1), silent, misses);
}

/* The hash of each packet that is sent is not that of its answer, which the driver therefore
 * passes on to another processor, by a deferred procedure there. */
static void check_passed_on(void)
{
    u32 misses = diagnosis().rss.Misses, elsewhere = deferred.elsewhere;
    load.astray = 1;
    load_run("rss.astray", 600);
    load.astray = 0;
    misses = diagnosis().rss.Misses - misses;
    elsewhere = deferred.elsewhere - elsewhere;
    check(misses && elsewhere, "rss.passed_on", "misses=%u elsewhere=%u", misses, elsewhere);
}

/* What the peer sends raises the message of received packets; the one packet that asks for it, that
 * of sent ones. A device may raise one message for all that it receives. */
static void check_messages(u32 queues)
{
    u32 received_messages = 0, sent_messages = 0;
    load_begin();
    mark_messages();
    send_flood(OWN, 2000, 200);
    check_traffic("rss.flood", 30000);
    for (u32 i = 0; i < queues; i++) {
        received_messages += messages_of(i, 1);
        sent_messages += messages_of(i, 0);
    }
    check(received_messages && sent_messages <= 1, "rss.messages", "received=%u sent=%u",
          received_messages, sent_messages);
}

/* Packets come one after the other to a pair of queues that sends nothing meanwhile, so that only
 * the message of each makes the driver look. Another pair asks for them. Before each round the pair
 * sends a packet of their connection, by which Linux learns where to deliver them. It forgets that
 * within seconds. */
static void check_receiving(u32 pair, u32 queues)
{
    u32 received_messages = 0, sent_messages = 0, round = 0;
    load.alone = 1;
    load.sender = (pair + 1) % queues;
    load.connection = load_connection_to(pair);
    for (; round < ROUNDS && load_run(NULL, 1); round++) {
        load.carried = 1;
        load.count = RECEIVED;
        load_begin();
        mark_messages();
        processors_run(nic.mode.processors, load_send);
        received_messages += messages_of(pair, 1);
        sent_messages += messages_of(pair, 0);
        load.carried = 0;
        if (!load_judge(NULL))
            break;
    }
    load.alone = 0;
    check(round == ROUNDS && received_messages >= ROUNDS * RECEIVED / 2 && !sent_messages,
          "rss.receiving", "pair=%u rounds=%u received=%u sent=%u", pair, round, received_messages,
          sent_messages);
}

/* Run by the first processor while the others send. */

static void change_tables(void)
{
    for (u32 i = 1; i <= CHANGES && !problem; i++) {
        if (table_set(0, nic.mode.processors, i) != NDIS_STATUS_SUCCESS)
            problem = "the table was refused";
        wait_for(CHANGE_MICROSECONDS);
    }
}

static void pause_and_restart(void)
{
    for (u32 i = 0; i < DISTURBANCES && !problem; i++) {
        wait_for(PAUSE_MICROSECONDS);
        problem = nic_pause();
        wait_for(PAUSE_MICROSECONDS);
        if (!problem)
            problem = nic_restart();
    }
}

static void reset(void)
{
    for (u32 i = 0; i < DISTURBANCES && !problem; i++) {
        wait_for(PAUSE_MICROSECONDS);
        problem = nic_reset();
    }
}

static int link_is(void *state)
{
    return (int)nic.told.link.MediaConnectState == *(int *)state;
}

static void pull_the_cable(void)
{
    static int up = MediaConnectStateConnected, down = MediaConnectStateDisconnected;
    for (u32 i = 0; i < DISTURBANCES / 2 && !problem; i++) {
        print("host: link down\n");
        if (!wait_until(link_is, &down, 20000000))
            problem = "the link stayed up";
        wait_for(PAUSE_MICROSECONDS);
        print("host: link up\n");
        if (!wait_until(link_is, &up, 20000000))
            problem = "the link stayed down";
        wait_for(PAUSE_MICROSECONDS);
    }
}

static void (*disturbance)(void);

static void send_or_disturb(void)
{
    if (this_processor()) {
        load_send();
        return;
    }
    disturbance();
    load.over = 1;
}

/* Packets may be lost while the adapter is disturbed, but all that are sent are completed, none
 * comes twice or damaged, and none is lost afterwards. */
static void disturb(const char *name, void (*how)(void))
{
    Landed *it = &landed;
    disturbance = how;
    problem = NULL;
    load.disturbs = 1;
    load.follow_ups = load.over = 0;
    load_begin();
    processors_run(nic.mode.processors, send_or_disturb);
    load.disturbs = 0;
    if (!packets_completed())
        problem = "packets were not completed";
    /* While its table changes, the driver itself may take a packet on a processor that had its
     * queue before. */
    int complete = load.loses ? !it->misplaced : it->arrived == it->sent;
    check(!problem && complete && it->arrived && !it->wrong && !it->others && !it->bad_hashes &&
              !it->bad_checksums,
          name,
          "%s sent=%u arrived=%u failed=%u wrong=%u others=%u misplaced=%u hashes=%u "
          "follow_ups=%u",
          problem ? problem : "survived", it->sent, it->arrived, sent.failed, it->wrong,
          it->others, it->misplaced, it->bad_hashes, load.follow_ups);
    memset(&sent, 0, sizeof sent);
    traffic_settle();
    load_run(name, 200);
}

static void begin(u32 processors, u32 queues)
{
    NetKvm_Config config = {0};
    u32 hash = hash_example();
    check(hash == EXAMPLE_HASH, "rss.hash", "%x", hash);
    nic_query(OID_NETKVM_CONFIG, &config, sizeof config, NULL);
    u32 flags = nic.told.scale.CapabilitiesFlags;
    check(config.NumOfQueues == queues && nic.told.scale.NumberOfReceiveQueues >= processors &&
              (flags & NDIS_RSS_CAPS_HASH_TYPE_TCP_IPV4) &&
              (flags & NDIS_RSS_CAPS_HASH_TYPE_UDP_IPV6),
          "rss.capabilities", "pairs=%u receivers=%u flags=%x", config.NumOfQueues,
          nic.told.scale.NumberOfReceiveQueues, flags);
    load.offloads = offloads_enable();
    load.scaled = 0;
    load_run("rss.before", 200);
    NDIS_STATUS status = table_set(0, processors, 0);
    check(status == NDIS_STATUS_SUCCESS, "rss.set", "status=%x", status);
    load.scaled = 1;
}

static void narrow(u32 processors)
{
    u32 first = 1, count = processors > 2 ? 2 : 1;
    NDIS_STATUS status = table_set(first, count, 0);
    load_run("rss.narrow", 400);
    u32 outside = landed.by_processor[0] + landed.by_processor[3];
    check(status == NDIS_STATUS_SUCCESS && !outside, "rss.few_processors",
          "status=%x first=%u count=%u outside=%u", status, first, count, outside);
}

static void switch_off(u32 processors)
{
    NDIS_STATUS status = table_set(0, 0, 0);
    load.scaled = 0;
    load_run("rss.off", 400);
    NDIS_STATUS again = table_set(0, processors, 5);
    load.scaled = 1;
    check(status == NDIS_STATUS_SUCCESS && again == NDIS_STATUS_SUCCESS, "rss.on",
          "status=%x again=%x", status, again);
}

void check_scaling(void)
{
    u32 processors = nic.mode.processors, queues = option_number("pairs", 1);
    if (!nic.mode.together)
        return;
    if (queues > processors)
        queues = processors;
    begin(processors, queues);
    check_own_queues("rss.load", queues);
    check_passed_on();
    check_messages(queues);
    for (u32 pair = 0; queues > 1 && pair < queues; pair++)
        check_receiving(pair, queues);
    narrow(processors);
    switch_off(processors);
    disturb("rss.changes", change_tables);
    load.loses = 1;
    disturb("rss.pauses", pause_and_restart);
    disturb("rss.resets", reset);
    if (option("host"))
        disturb("rss.link", pull_the_cable);
    load.loses = 0;
    nic_sleep();
    const char *failed = nic_wake();
    check(!failed, "rss.woken", "%s", failed ? failed : "woken");
    check_own_queues("rss.after_sleep", queues);
    u32 collisions = used_collisions();
    check(!collisions && deferred.most_inside > 1, "rss.together", "collisions=%u at_once=%u",
          collisions, deferred.most_inside);
    traffic_settle();
}

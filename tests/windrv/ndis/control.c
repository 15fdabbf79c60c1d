/* Checks of what goes through the control queue, and of the link. */
#include "traffic.h"
#include "../include/ndis/netkvmmof.h"

enum { OID_NETKVM_DIAG = 0xff010203, VLANS = 4095 };
static const u8 OTHER[ADDRESS] = {2, 0, 0, 0, 0, 9};
static const u8 GROUPS[2][ADDRESS] = {{1, 0, 0x5e, 0, 0, 1}, {1, 0, 0x5e, 0, 0, 2}};
static const u8 *const DESTINATIONS[] = {OWN, EVERYBODY, OTHER, GROUPS[0], GROUPS[1]};
enum { TO_OWN = 1, TO_EVERYBODY = 2, TO_OTHER = 4, TO_MEMBERS = 8, TO_STRANGERS = 16 };
enum { DEFAULT_FILTER = NDIS_PACKET_TYPE_DIRECTED | NDIS_PACKET_TYPE_BROADCAST };

static u32 delivered(void)
{
    u32 found = 0;
    for (u32 i = 0; i < sizeof DESTINATIONS / sizeof *DESTINATIONS; i++)
        found |= is_delivered(DESTINATIONS[i]) << i;
    return found;
}

static NDIS_STATUS filter(ULONG which)
{
    return nic_set(OID_GEN_CURRENT_PACKET_FILTER, &which, sizeof which);
}

/* The driver drops for itself what it does not want, so that this finds what the device drops. */
void check_filters(void)
{
    static const struct {
        u32 filter, wanted;
        const char *name;
    } CASES[] = {
        {NDIS_PACKET_TYPE_DIRECTED, TO_OWN, "filter.directed"},
        {DEFAULT_FILTER, TO_OWN | TO_EVERYBODY, "filter.broadcast"},
        {DEFAULT_FILTER | NDIS_PACKET_TYPE_MULTICAST, TO_OWN | TO_EVERYBODY | TO_MEMBERS,
         "filter.multicast"},
        {DEFAULT_FILTER | NDIS_PACKET_TYPE_ALL_MULTICAST,
         TO_OWN | TO_EVERYBODY | TO_MEMBERS | TO_STRANGERS, "filter.all_multicast"},
        {DEFAULT_FILTER | NDIS_PACKET_TYPE_PROMISCUOUS,
         TO_OWN | TO_EVERYBODY | TO_OTHER | TO_MEMBERS | TO_STRANGERS, "filter.promiscuous"},
        {DEFAULT_FILTER, TO_OWN | TO_EVERYBODY, "filter.default"},
    };
    nic_set(OID_802_3_MULTICAST_LIST, (void *)GROUPS[0], ADDRESS);
    for (u32 i = 0; i < sizeof CASES / sizeof *CASES; i++) {
        NDIS_STATUS status = filter(CASES[i].filter);
        u32 found = delivered();
        check(status == NDIS_STATUS_SUCCESS && found == CASES[i].wanted, CASES[i].name,
              "status=%x delivered=%x wanted=%x", status, found, CASES[i].wanted);
    }
    nic_set(OID_802_3_MULTICAST_LIST, NULL, 0);
    traffic_settle();
}

/* A tag is not in the frame, but beside it: the driver inserts and removes it. */

static u32 tags_seen, last_tag;

static void see_tag(PNET_BUFFER_LIST list, const u8 *, u32)
{
    NDIS_NET_BUFFER_LIST_8021Q_INFO info = {
        .Value = NET_BUFFER_LIST_INFO(list, Ieee8021QNetBufferListInfo)};
    tags_seen++;
    last_tag = info.TagHeader.VlanId | info.TagHeader.UserPriority << 12;
}

static int any_tag(void *)
{
    return tags_seen != 0;
}

/* The tag with which a tagged echo came back; all ones if it did not within the time. */
static u32 echo_tag(u32 vlan, u32 priority, u64 microseconds)
{
    static const Pieces HEADER_ALONE = {{HEADER}, 0};
    u8 frame[100];
    frame_make(frame, PEER, 0, random_number(), sizeof frame);
    PNET_BUFFER_LIST list = packet_new(frame, sizeof frame, &HEADER_ALONE);
    NDIS_NET_BUFFER_LIST_8021Q_INFO info = {0};
    info.TagHeader.VlanId = vlan;
    info.TagHeader.UserPriority = priority;
    NET_BUFFER_LIST_INFO(list, Ieee8021QNetBufferListInfo) = info.Value;
    on_receive = see_tag;
    tags_seen = 0;
    last_tag = ~0u;
    packets_send(list);
    wait_until(any_tag, NULL, microseconds);
    return last_tag;
}

void check_vlans(void)
{
    enum { PATIENCE = 10000000 };
    ULONG vlan = 5, none = 0;
    u32 found = echo_tag(77, 3, PATIENCE);
    check(found == (77 | 3 << 12), "vlan.any", "tag=%x", found);
    NDIS_STATUS status = nic_set(OID_GEN_VLAN_ID, &vlan, sizeof vlan);
    found = echo_tag(5, 0, PATIENCE);
    u32 other = echo_tag(6, 0, 500000);
    check(status == NDIS_STATUS_SUCCESS && found == 5, "vlan.member", "status=%x tag=%x", status,
          found);
    check(other != 6, "vlan.other", "tag=%x", other);
    status = nic_set(OID_GEN_VLAN_ID, &none, sizeof none);
    found = echo_tag(4094, 7, PATIENCE);
    check(status == NDIS_STATUS_SUCCESS && found == (4094 | 7 << 12), "vlan.all",
          "status=%x tag=%x", status, found);
    check(traffic_settle(), "vlan.end", "settled");
}

/* The link goes down and up, and the driver announces its addresses. */

static int link_is(void *state)
{
    return (int)nic.told.link.MediaConnectState == *(int *)state;
}

static int announced(void *)
{
    return arrived.reports != 0;
}

static void set_address(void)
{
    struct {
        NETWORK_ADDRESS_LIST list;
        u8 rest[64];
    } it = {0};
    NETWORK_ADDRESS_IP *ip = (NETWORK_ADDRESS_IP *)it.list.Address[0].Address;
    it.list.AddressCount = 1;
    it.list.AddressType = NDIS_PROTOCOL_ID_TCP_IP;
    it.list.Address[0].AddressLength = sizeof *ip;
    it.list.Address[0].AddressType = NDIS_PROTOCOL_ID_TCP_IP;
    ip->in_addr = 0x0200000a;
    nic_set(OID_GEN_NETWORK_LAYER_ADDRESSES, &it, sizeof it);
}

static int up = MediaConnectStateConnected, down = MediaConnectStateDisconnected;

static void unplug(void)
{
    static const Pieces WHOLE = {{0}, 0};
    print("host: link down\n");
    int went = wait_until(link_is, &down, 20000000);
    for (u32 i = 0; i < 8; i++)
        echo(100, &WHOLE);
    int completed = packets_completed();
    check(went && completed && sent.failed == 8, "link.down", "state=%u completed=%u failed=%u",
          nic.told.link.MediaConnectState, sent.completed, sent.failed);
    memset(&sent, 0, sizeof sent);
    traffic_forget();
}

/* The peer's report can be lost: the device drops what comes before it has seen the new link. */
void check_link(void)
{
    enum { TRIES = 4, ANNOUNCE_MICROSECONDS = 5000000 };
    u32 heard = 0, tries = 0;
    if (!option("host"))
        return;
    set_address();
    for (; tries < TRIES && !heard; tries++) {
        unplug();
        print("host: link up\n");
        int went = wait_until(link_is, &up, 20000000);
        heard = wait_until(announced, NULL, ANNOUNCE_MICROSECONDS);
        check(went && nic.told.link.XmitLinkSpeed == 10000000000ull, "link.up",
              "changes=%u speed=%llu", nic.told.link_changes, nic.told.link.XmitLinkSpeed);
    }
    u8 *report = last_other + HEADER;
    int good = last_other_length >= HEADER + 42 && report[12] == 8 && report[13] == 6;
    check(heard && good && !memcmp(report + ADDRESS, OWN, ADDRESS), "link.announce",
          "tries=%u reports=%u length=%u type=%02x%02x", tries, arrived.reports, last_other_length,
          report[12], report[13]);
    check(traffic_settle(), "link.end", "settled");
}

/* Every command was answered in time with OK: the driver gives up the adapter otherwise. */
void check_statistics(void)
{
    NetKvm_Diag diag = {0};
    NDIS_STATISTICS_INFO statistics = {0};
    nic_query(OID_NETKVM_DIAG, &diag, sizeof diag, NULL);
    nic_query(OID_GEN_STATISTICS, &statistics, sizeof statistics, NULL);
    /* All VLANs are switched on and, before those of one, off. */
    check(diag.ctrl.Commands >= 3 * VLANS && !diag.ctrl.CommandsFailed &&
              !diag.ctrl.CommandsTimedOut && !nic.told.removal,
          "commands", "commands=%u failed=%u timed_out=%u removal=%u", diag.ctrl.Commands,
          diag.ctrl.CommandsFailed, diag.ctrl.CommandsTimedOut, nic.told.removal);
    check(statistics.ifHCInUcastPkts > 5000 && statistics.ifHCOutUcastPkts > 5000 &&
              !statistics.ifInErrors,
          "statistics", "in=%llu out=%llu errors=%llu", statistics.ifHCInUcastPkts,
          statistics.ifHCOutUcastPkts, statistics.ifInErrors);
}

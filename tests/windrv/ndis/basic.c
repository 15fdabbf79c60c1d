/* Checks of the adapter's identity, and of packets of all sizes and shapes, there and back. */
#include "traffic.h"

enum { SECOND = 1000, PATIENT = 30 * SECOND };
static const Pieces WHOLE = {{0}, 0};

static u32 longest(void)
{
    return nic.told.general.MtuSize + HEADER;
}

void check_identity(void)
{
    NDIS_MINIPORT_ADAPTER_GENERAL_ATTRIBUTES *it = &nic.told.general;
    u8 permanent[ADDRESS] = {0}, now[ADDRESS] = {0};
    u32 mtu = option_number("mtu", 1500);
    nic_query(OID_802_3_PERMANENT_ADDRESS, permanent, ADDRESS, NULL);
    nic_query(OID_802_3_CURRENT_ADDRESS, now, ADDRESS, NULL);
    int same = !memcmp(permanent, OWN, ADDRESS) && !memcmp(now, OWN, ADDRESS);
    check(same && !memcmp(it->CurrentMacAddress, OWN, ADDRESS), "address",
          "%02x:%02x:%02x:%02x:%02x:%02x", now[0], now[1], now[2], now[3], now[4], now[5]);
    check(it->MtuSize == mtu, "mtu", "%u", it->MtuSize);
    check(nic.told.link.MediaConnectState == MediaConnectStateConnected &&
              it->XmitLinkSpeed == 10000000000ull && it->MediaDuplexState == MediaDuplexStateFull,
          "link", "state=%u speed=%llu duplex=%u", nic.told.link.MediaConnectState,
          it->XmitLinkSpeed, it->MediaDuplexState);
}

/* Every size, at most 64 at once. */
void check_sizes(void)
{
    for (u32 length = STAMPED; length <= longest(); length++) {
        echo(length, &WHOLE);
        if (length % 64 == 0 && !traffic_arrived(PATIENT))
            break;
    }
    check_traffic("sizes", PATIENT);
}

void check_pieces(void)
{
    static const Pieces SHAPES[] = {
        {{14}, 0},
        {{14, 20, 1500}, 3},
        {{1}, 0},
        {{1}, 4095},
        {{2, 3, 5, 7, 11, 13, 17, 19}, 1},
        {{1514}, 4000},
        {{100}, 4090},
        {{64}, 2048},
        {{7}, 4093},
    };
    for (u32 i = 0; i < sizeof SHAPES / sizeof *SHAPES; i++)
        for (u32 length = 60; length <= longest(); length += i == 2 || i == 3 ? 97 : 31) {
            echo(length, &SHAPES[i]);
            if (traffic_missing() >= 64 && !traffic_arrived(PATIENT))
                break;
        }
    check_traffic("pieces", PATIENT);
}

/* Many at once, of random sizes. */
static void load(const char *name, u32 at_once, u32 total)
{
    for (u32 i = 0; i < total; i++) {
        echo(STAMPED + random_number() % (longest() - STAMPED + 1), &WHOLE);
        if (traffic_missing() >= at_once && !traffic_arrived(PATIENT))
            break;
    }
    check_traffic(name, PATIENT);
}

void check_loads(void)
{
    load("load1", 1, 200);
    load("load32", 32, 1000);
    load("load200", 200, 2000);
}

/* Frames that nobody asked for; at times the checks keep them, so that the driver runs short. */
void check_floods(void)
{
    send_flood(OWN, 1000, longest());
    check_traffic("flood", PATIENT);
    send_flood(OWN, 3000, 60);
    check_traffic("flood.short", PATIENT);
    keep = 200;
    send_flood(OWN, 200, 700);
    traffic_arrived(PATIENT);
    u32 held = received.kept;
    packets_return();
    keep = 0;
    check(held >= 100, "flood.kept", "lists=%u", held);
    check_traffic("flood.returned", PATIENT);
    throttle = 3;
    send_flood(OWN, 500, 500);
    traffic_arrived(PATIENT);
    throttle = 64;
    check_traffic("flood.throttled", PATIENT);
}

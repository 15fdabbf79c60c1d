/* Checks of what the driver leaves to the device: checksums and segments of TCP and UDP. The peer
 * sends such packets back as they are, if the part of the checksum that is left to the driver is
 * right. */
#include "traffic.h"

enum { IPV4_LENGTH = 20, IPV6_LENGTH = 40, TCP_LENGTH = 20, UDP_LENGTH = 8, ROOM = 66 << 10 };
enum { TCP = 6, UDP = 17, SECONDS = 1000000 };
const Flow FLOWS[FLOW_KINDS] = {{"tcp4", 0, 0}, {"udp4", 0, 1}, {"tcp6", 1, 0}, {"udp6", 1, 1}};

static u8 frame[ROOM], back[ROOM];
static u32 frame_length, back_length, came;
static NDIS_TCP_IP_CHECKSUM_NET_BUFFER_LIST_INFO back_checksum;
static u32 back_segments;

void put2(u8 *at, u32 value)
{
    at[0] = value >> 8;
    at[1] = value;
}

static u32 add(u32 sum, const u8 *from, u32 length)
{
    for (u32 i = 0; i < length; i++)
        sum += i % 2 ? from[i] : from[i] << 8;
    return sum;
}

static u32 fold(u32 sum)
{
    while (sum >> 16)
        sum = (sum & 0xffff) + (sum >> 16);
    return sum;
}

u32 transport_at(const Flow *flow)
{
    return HEADER + (flow->v6 ? IPV6_LENGTH : IPV4_LENGTH);
}

static u32 transport_length(const Flow *flow)
{
    return flow->udp ? UDP_LENGTH : TCP_LENGTH;
}

static void put_ip(u8 *ip, const Flow *flow, u32 length)
{
    if (flow->v6) {
        ip[0] = 0x60;
        put2(ip + 4, length);
        ip[6] = flow->udp ? UDP : TCP;
        ip[7] = 64;
        ip[8] = ip[24] = 0xfd;
        ip[23] = 2;
        ip[39] = 1;
    } else {
        ip[0] = 0x45;
        put2(ip + 2, IPV4_LENGTH + length);
        ip[8] = 64;
        ip[9] = flow->udp ? UDP : TCP;
        ip[12] = ip[16] = 10;
        ip[15] = 2;
        ip[19] = 1;
    }
}

u32 payload_at(const Flow *flow)
{
    return transport_at(flow) + transport_length(flow);
}

void flow_headers(u8 *to, const Flow *flow, u32 payload, int with_length)
{
    u32 at = transport_at(flow), length = transport_length(flow) + payload;
    u8 *ip = to + HEADER, *transport = to + at;
    memset(to, 0, at + TCP_LENGTH);
    memcpy(to, PEER, ADDRESS);
    memcpy(to + ADDRESS, OWN, ADDRESS);
    put2(to + 12, flow->v6 ? 0x86dd : 0x0800);
    put_ip(ip, flow, length);
    put2(transport, 1000 + random_number() % 1000);
    put2(transport + 2, 80);
    u32 sum = add(flow->udp ? UDP : TCP, ip + (flow->v6 ? 8 : 12), flow->v6 ? 32 : 8);
    sum = fold(sum + (with_length ? length : 0));
    if (flow->udp) {
        put2(transport + 4, length);
        put2(transport + 6, sum);
    } else {
        transport[12] = TCP_LENGTH / 4 << 4;
        transport[13] = 0x10;
        put2(transport + 14, 65535);
        put2(transport + 16, sum);
    }
}

void flow_complete(u8 *frame, const Flow *flow, u32 length)
{
    u32 at = transport_at(flow);
    u8 *ip = frame + HEADER, *checksum = frame + at + (flow->udp ? 6 : 16);
    u32 sum = fold(add(0, frame + at, length - at)) ^ 0xffff;
    put2(checksum, sum ? sum : 0xffff);
    if (!flow->v6)
        put2(ip + 10, fold(add(0, ip, IPV4_LENGTH)) ^ 0xffff);
}

static void make(const Flow *flow, u32 payload, int with_length)
{
    flow_headers(frame, flow, payload, with_length);
    frame_length = payload_at(flow) + payload;
    for (u32 i = payload_at(flow); i < frame_length; i++)
        frame[i] = random_number();
}

static void see(PNET_BUFFER_LIST list, const u8 *from, u32 length)
{
    if (length > ROOM || memcmp(from + ADDRESS, PEER, ADDRESS))
        return;
    memcpy(back, from, length);
    back_length = length;
    back_checksum.Value = NET_BUFFER_LIST_INFO(list, TcpIpChecksumNetBufferListInfo);
    back_segments = NET_BUFFER_LIST_COALESCED_SEG_COUNT(list);
    came++;
}

static int has_come(void *)
{
    return came != 0;
}

/* Whether the packet comes back with the same payload. */
static int exchange(const Flow *flow, PNET_BUFFER_LIST list)
{
    u32 payload = payload_at(flow);
    on_receive = see;
    came = 0;
    packets_send(list);
    return wait_until(has_come, NULL, 5 * SECONDS) && back_length == frame_length &&
           !memcmp(back + payload, frame + payload, frame_length - payload);
}

/* What Windows' stack does before it uses offloads. */
int offloads_enable(void)
{
    NDIS_OFFLOAD_ENCAPSULATION it = {0};
    if (!option("offloads"))
        return 0;
    it.Header.Type = NDIS_OBJECT_TYPE_OFFLOAD_ENCAPSULATION;
    it.Header.Revision = NDIS_OFFLOAD_ENCAPSULATION_REVISION_1;
    it.Header.Size = NDIS_SIZEOF_OFFLOAD_ENCAPSULATION_REVISION_1;
    it.IPv4.Enabled = it.IPv6.Enabled = NDIS_OFFLOAD_SET_ON;
    it.IPv4.EncapsulationType = it.IPv6.EncapsulationType = NDIS_ENCAPSULATION_IEEE_802_3;
    it.IPv4.HeaderSize = it.IPv6.HeaderSize = HEADER;
    NDIS_STATUS status = nic_set(OID_OFFLOAD_ENCAPSULATION, &it, sizeof it);
    check(status == NDIS_STATUS_SUCCESS && nic.told.offload.Checksum.IPv4Transmit.TcpChecksum &&
              nic.told.offload.Checksum.IPv6Transmit.UdpChecksum &&
              nic.told.offload.LsoV2.IPv4.MaxOffLoadSize,
          "offloads", "status=%x largest=%u", status, nic.told.offload.LsoV2.IPv4.MaxOffLoadSize);
    return 1;
}

void flow_ask(PNET_BUFFER_LIST list, const Flow *flow)
{
    NDIS_TCP_IP_CHECKSUM_NET_BUFFER_LIST_INFO info = {0};
    info.Transmit.IsIPv4 = !flow->v6;
    info.Transmit.IsIPv6 = flow->v6;
    info.Transmit.TcpChecksum = !flow->udp;
    info.Transmit.UdpChecksum = flow->udp;
    info.Transmit.IpHeaderChecksum = !flow->v6;
    info.Transmit.TcpHeaderOffset = transport_at(flow);
    NET_BUFFER_LIST_INFO(list, TcpIpChecksumNetBufferListInfo) = info.Value;
}

static int is_verified(NDIS_TCP_IP_CHECKSUM_NET_BUFFER_LIST_INFO info, const Flow *flow)
{
    return flow->udp ? info.Receive.UdpChecksumSucceeded : info.Receive.TcpChecksumSucceeded;
}

int flow_is_right(PNET_BUFFER_LIST list, const Flow *flow)
{
    NDIS_TCP_IP_CHECKSUM_NET_BUFFER_LIST_INFO info = {
        .Value = NET_BUFFER_LIST_INFO(list, TcpIpChecksumNetBufferListInfo)};
    return is_verified(info, flow);
}

static int checksum_of(const Flow *flow, u32 payload)
{
    static const Pieces TWO = {{64, 2000}, 10};
    make(flow, payload, 1);
    PNET_BUFFER_LIST list = packet_new(frame, frame_length, &TWO);
    flow_ask(list, flow);
    int good = exchange(flow, list);
    int known = is_verified(back_checksum, flow);
    return good && known && (flow->v6 || fold(add(0, back + HEADER, IPV4_LENGTH)) == 0xffff);
}

void check_checksums(void)
{
    if (!offloads_enable())
        return;
    for (u32 i = 0; i < sizeof FLOWS / sizeof *FLOWS; i++) {
        u32 good = 0, all = 0;
        for (u32 payload = 20; payload <= 1400; payload += 137, all++)
            good += checksum_of(&FLOWS[i], payload);
        check(good == all, FLOWS[i].name, "good=%u of=%u", good, all);
    }
    traffic_settle();
}

/* One packet of many segments comes back as one, because the driver takes those, too. */
void check_large_sends(void)
{
    enum { MSS = 1000 };
    static const Pieces HEADERS_FIRST = {{54, 4096}, 0}, HEADERS_FIRST_6 = {{74, 3000}, 100};
    if (!option("offloads"))
        return;
    for (int v6 = 0; v6 <= 1; v6++) {
        const Flow *flow = &FLOWS[2 * v6];
        u32 good = 0, all = 0, segments = 0;
        for (u32 payload = 2 * MSS; payload <= 60 * MSS; payload += 7919, all++) {
            NDIS_TCP_LARGE_SEND_OFFLOAD_NET_BUFFER_LIST_INFO info = {0};
            make(flow, payload, 0);
            info.LsoV2Transmit.MSS = MSS;
            info.LsoV2Transmit.TcpHeaderOffset = transport_at(flow);
            info.LsoV2Transmit.Type = NDIS_TCP_LARGE_SEND_OFFLOAD_V2_TYPE;
            info.LsoV2Transmit.IPVersion = v6;
            PNET_BUFFER_LIST list =
                packet_new(frame, frame_length, v6 ? &HEADERS_FIRST_6 : &HEADERS_FIRST);
            NET_BUFFER_LIST_INFO(list, TcpLargeSendNetBufferListInfo) = info.Value;
            good += exchange(flow, list) && back_segments == (payload + MSS - 1) / MSS;
            segments += back_segments;
        }
        check(good == all, v6 ? "large_sends6" : "large_sends4", "good=%u of=%u segments=%u", good,
              all, segments);
    }
    traffic_settle();
}

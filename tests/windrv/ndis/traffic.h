/* Frames that go to the peer (`tests/windrv/peer`) and come back, and frames that it sends. */
#ifndef WINDRV_TRAFFIC_H
#define WINDRV_TRAFFIC_H
#include "shim.h"

enum { ADDRESS = 6, HEADER = 14, STAMPED = HEADER + 8, SHORTEST = 60, MAX_FRAMES = 8192 };
extern const u8 PEER[ADDRESS], REPEATER[ADDRESS], SWAPPER[ADDRESS], CARRIER[ADDRESS],
    EVERYBODY[ADDRESS], OWN[ADDRESS];
enum { TEST_TYPE = 0x88b5, REPORT_TYPE = 0x88b6 };

/* Writes a frame of the tests' type. After the header: its number, a stamp, and content that the
 * stamp and the length determine. */
void frame_make(u8 *to, const u8 *destination, u32 number, u32 stamp, u32 length);

/* What has come back. */
typedef struct {
    u32 frames, wrong, twice, unknown; /* of the tests' type */
    u32 reports;                       /* other frames that the peer has seen, sent back */
    u32 others;
} Arrived;
extern Arrived arrived;
/* The last report's content, and the last other frame. */
extern u8 last_other[2048];
extern u32 last_other_length;
/* Forgets what has arrived. Frames that are still under way are unknown then. */
void traffic_forget(void);
/* Frames with these numbers are under way. */
void traffic_expect(u32 first, u32 count, u32 stamp, u32 length);
/* Whether all of them have arrived, within the time limit. */
int traffic_arrived(u32 milliseconds);
u32 traffic_missing(void);
/* Sends one frame that the peer sends back. */
void echo(u32 length, const Pieces *);
/* Has the peer send this many frames of a length to an address. */
void send_flood(const u8 *destination, u32 count, u32 length);
/* Has the peer send one frame to an address; whether it has arrived when a later one has. */
int is_delivered(const u8 *destination);
/* Waits until everything that the peer has sent so far has arrived, and forgets it. */
int traffic_settle(void);
/* Sends anything. */
void send_frame(const u8 *frame, u32 length);
/* Reports a check: everything has been completed and has arrived, as it was, and nothing else. */
void check_traffic(const char *name, u32 milliseconds);

/* flows.c: TCP and UDP. */
typedef struct {
    const char *name;
    int v6, udp;
} Flow;
enum { FLOW_KINDS = 4 };
extern const Flow FLOWS[FLOW_KINDS];
void put2(u8 *at, u32 value);
u32 transport_at(const Flow *);
u32 payload_at(const Flow *);
/* Writes the headers of a packet to the peer, whose checksums are left to the driver: it has the
 * sum of addresses, protocol and, but for segments, length. */
void flow_headers(u8 *to, const Flow *, u32 payload, int with_length);
/* Completes the checksums of a packet of this length. */
void flow_complete(u8 *frame, const Flow *, u32 length);
/* Asks the driver to complete them. */
void flow_ask(PNET_BUFFER_LIST, const Flow *);
/* Whether the driver says that the checksum of a received packet is right. */
int flow_is_right(PNET_BUFFER_LIST, const Flow *);
/* With `offloads=on`: what Windows' stack does before it uses offloads. */
int offloads_enable(void);

/* The checks. */
void check_identity(void);
void check_sizes(void);
void check_pieces(void);
void check_loads(void);
void check_floods(void);
void check_filters(void);
void check_vlans(void);
void check_link(void);
void check_statistics(void);
void check_pauses(void);
void check_resets(void);
void check_sleeps(void);
/* In the modes `smp…`: */
void check_scaling(void);
/* With `offloads=on`: */
void check_checksums(void);
void check_large_sends(void);
/* Leaves packets under way for the end of the adapter. */
void leave_traffic(void);
#endif

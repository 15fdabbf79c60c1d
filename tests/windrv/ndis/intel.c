/* Intel's network card (82574) beside NetKVM, on a network of its own: each of its interrupts takes
 * frames that its peer has sent back, and sends as many, while NetKVM is checked. */
#include "intel.h"
#include "traffic.h"

enum { VENDOR_DEVICE = 0x10d38086, ENTRIES = 64, UNDER_WAY = 8, ROOM = 2048, LONGEST = 1500 };
enum {
    CTRL = 0x0000,
    ICR = 0x00c0,
    IMS = 0x00d0,
    IMC = 0x00d8,
    RCTL = 0x0100,
    TCTL = 0x0400,
    RECEIVE = 0x2800,
    TRANSMIT = 0x3800,
    ADDRESS_LOW = 0x5400,
    ADDRESS_HIGH = 0x5404,
};
/* Registers of a ring, after its address. */
enum { RING_LENGTH = 0x08, RING_TAIL = 0x18 };
enum { RESET = 1 << 26, LINK_UP = 1 << 6, RECEIVED = 1 << 7, VALID = 1u << 31 };
/* RCTL: enabled, broadcasts, no checksum at the end. TCTL: enabled, short frames are padded. */
enum { RECEIVES = 1 << 1 | 1 << 15 | 1 << 26, TRANSMITS = 1 << 1 | 1 << 3 };
enum { END_OF_FRAME = 1, ADD_CHECKSUM = 2, REPORT_STATUS = 8, IS_DONE = 1 };

/* A descriptor of either direction, in its oldest form. */
typedef struct {
    u64 buffer;
    u16 length;
    u8 offset, command; /* of a received frame: its checksum */
    u8 status, errors;
    u16 special;
} Descriptor;

static const u8 OWN_ADDRESS[ADDRESS] = {2, 0, 0, 0, 0, 0x10};
static volatile Descriptor receive[ENTRIES] __attribute__((aligned(128)));
static volatile Descriptor transmit[ENTRIES] __attribute__((aligned(128)));
static u8 received_frames[ENTRIES][ROOM], sent_frames[ENTRIES][ROOM];
static struct {
    PciAddress pci;
    volatile u32 *registers;
    u32 sent, back, wrong, interrupts, spurious;
} card;

static u32 get(u32 offset)
{
    return card.registers[offset / 4];
}

static void set(u32 offset, u32 value)
{
    card.registers[offset / 4] = value;
}

static int find(void)
{
    PciAddress *it = &card.pci;
    for (it->device = it->function = 0; it->device < 32; it->device++)
        if (pci_read(*it, PCI_ID) == VENDOR_DEVICE)
            return 1;
    return 0;
}

static void ring(u32 base, volatile Descriptor *from)
{
    set(base, (u64)from);
    set(base + 4, (u64)from >> 32);
    set(base + RING_LENGTH, ENTRIES * sizeof *from);
}

/* The length of a frame by its number: each from the shortest one on, in another order. */
static u32 length_of(u32 number)
{
    return SHORTEST + number * 97 % (LONGEST - SHORTEST);
}

static void make(u8 *to, u32 number)
{
    frame_make(to, PEER, number, ~number, length_of(number));
    memcpy(to + ADDRESS, OWN_ADDRESS, ADDRESS);
}

static void send(void)
{
    u32 at = card.sent % ENTRIES;
    make(sent_frames[at], card.sent);
    transmit[at] = (Descriptor){
        .buffer = (u64)sent_frames[at],
        .length = length_of(card.sent),
        .command = END_OF_FRAME | ADD_CHECKSUM | REPORT_STATUS,
    };
    set(TRANSMIT + RING_TAIL, ++card.sent % ENTRIES);
}

/* The peer sends frames back in their order, with the addresses swapped. */
static void take(u32 at)
{
    static u8 wanted[ROOM];
    make(wanted, card.back);
    memcpy(wanted, OWN_ADDRESS, ADDRESS);
    memcpy(wanted + ADDRESS, PEER, ADDRESS);
    u32 length = length_of(card.back++);
    card.wrong +=
        receive[at].length != length || memcmp(received_frames[at], wanted, length) != 0;
    receive[at].status = 0;
    /* It belongs to the card again. */
    set(RECEIVE + RING_TAIL, at);
}

void intel_start(void)
{
    PciBar bars[6];
    memset(&card, 0, sizeof card);
    if (!find())
        return;
    pci_bars(card.pci, bars);
    card.registers = map_device(bars[0].address, bars[0].length);
    set(CTRL, RESET);
    set(IMC, ~0u);
    set(CTRL, LINK_UP);
    memset((void *)receive, 0, sizeof receive);
    memset((void *)transmit, 0, sizeof transmit);
    for (u32 i = 0; i < ENTRIES; i++)
        receive[i].buffer = (u64)received_frames[i];
    ring(RECEIVE, receive);
    ring(TRANSMIT, transmit);
    set(ADDRESS_LOW, OWN_ADDRESS[0] | (u32)OWN_ADDRESS[3] << 24);
    set(ADDRESS_HIGH, OWN_ADDRESS[4] | OWN_ADDRESS[5] << 8 | VALID);
    set(RCTL, RECEIVES);
    set(TCTL, TRANSMITS);
    set(RECEIVE + RING_TAIL, ENTRIES - 1);
    set(IMS, RECEIVED);
    for (u32 i = 0; i < UNDER_WAY; i++)
        send();
}

/* The interrupt controller's input for a slot: four inputs serve all slots. */
static u32 line_of(PciAddress it)
{
    return INTX_PINS / 2 + it.device % (INTX_PINS / 2);
}

int intel_has_line(u32 pin)
{
    return card.registers && pin == line_of(card.pci);
}

int intel_shares_line(PciAddress with)
{
    return line_of(card.pci) == line_of(with);
}

int intel_service(void)
{
    if (!(get(ICR) & RECEIVED))
        return 0;
    card.interrupts++;
    u32 before = card.back;
    while (receive[card.back % ENTRIES].status & IS_DONE) {
        take(card.back % ENTRIES);
        send();
    }
    card.spurious += card.back == before;
    return 1;
}

void intel_stop(void)
{
    enum { LEAST = 200 };
    if (!card.registers)
        return;
    int shared = intel_shares_line(nic.pci);
    check(card.back >= LEAST && !card.wrong, shared ? "on_one_line" : "beside",
          "back=%u wrong=%u interrupts=%u spurious=%u", card.back, card.wrong, card.interrupts,
          card.spurious);
    set(IMC, ~0u);
    set(RCTL, 0);
    set(CTRL, RESET);
    pci_write(card.pci, PCI_COMMAND, COMMAND_NO_INTX);
    card.registers = NULL;
}

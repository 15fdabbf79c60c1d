/* Intel's network card (82574) beside NetKVM, on a network of its own. While it is busy, each of
 * its interrupts takes the frames that its peer has sent back, and sends as many. Registers have
 * the names of the 82574 datasheet (10.2). */
#include "intel.h"
#include "traffic.h"

enum { VENDOR_DEVICE = 0x10d38086, ENTRIES = 64, UNDER_WAY = 4, ROOM = 2048, LONGEST = 1514 };
enum {
    CTRL = 0x0000,
    ICR = 0x00c0,
    IMS = 0x00d0,
    IMC = 0x00d8,
    RCTL = 0x0100,
    TCTL = 0x0400,
    RDBAL = 0x2800,
    TDBAL = 0x3800,
    RAL = 0x5400,
    RAH = 0x5404,
};
/* The other registers of a ring, from its address on: RDLEN, RDT, TDLEN, TDT. */
enum { LEN = 0x08, TAIL = 0x18 };
enum { CTRL_RST = 1 << 26, CTRL_SLU = 1 << 6, ICR_RXT0 = 1 << 7, RAH_AV = 1u << 31 };
enum { RCTL_EN = 1 << 1, RCTL_BAM = 1 << 15, RCTL_SECRC = 1 << 26 };
enum { TCTL_EN = 1 << 1, TCTL_PSP = 1 << 3 };
enum { CMD_EOP = 1, CMD_IFCS = 2, CMD_RS = 8, STATUS_DD = 1, STATUS_EOP = 2 };

/* A legacy descriptor of either direction (7.1.4, 7.2.2). */
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
    int busy;
    u32 sent, back, wrong, unsent, stalls, interrupts;
} card;

static u32 get(u32 offset)
{
    return card.registers[offset / 4];
}

static void set(u32 offset, u32 value)
{
    card.registers[offset / 4] = value;
}

static void ring(u32 base, volatile Descriptor *from)
{
    set(base, (u64)from);
    set(base + 4, (u64)from >> 32);
    set(base + LEN, ENTRIES * sizeof *from);
}

/* The length of a frame by its number: every one from the shortest to the longest. */
static u32 length_of(u32 number)
{
    return SHORTEST + number * 97 % (LONGEST + 1 - SHORTEST);
}

static void make(u8 *to, u32 number)
{
    frame_make(to, PEER, number, ~number, length_of(number));
    memcpy(to + ADDRESS, OWN_ADDRESS, ADDRESS);
}

static void send(void)
{
    u32 at = card.sent % ENTRIES;
    /* The frame that was there before has come back. */
    card.unsent += card.sent >= ENTRIES && !(transmit[at].status & STATUS_DD);
    make(sent_frames[at], card.sent);
    transmit[at] = (Descriptor){
        .buffer = (u64)sent_frames[at],
        .length = length_of(card.sent),
        .command = CMD_EOP | CMD_IFCS | CMD_RS,
    };
    set(TDBAL + TAIL, ++card.sent % ENTRIES);
}

/* The peer sends frames back in their order, with the addresses swapped. */
static void take(u32 at)
{
    static u8 wanted[ROOM];
    make(wanted, card.back);
    memcpy(wanted, OWN_ADDRESS, ADDRESS);
    memcpy(wanted + ADDRESS, PEER, ADDRESS);
    u32 length = length_of(card.back++);
    int whole = receive[at].status & STATUS_EOP && !receive[at].errors;
    card.wrong +=
        !whole || receive[at].length != length || memcmp(received_frames[at], wanted, length) != 0;
    receive[at].status = 0;
    /* It belongs to the card again. */
    set(RDBAL + TAIL, at);
}

void intel_start(void)
{
    PciBar bars[6];
    u32 low = 0, high = 0;
    memset(&card, 0, sizeof card);
    /* With messages, nobody looks for interrupts of lines. */
    if (nic.interrupts.messages || !pci_find(VENDOR_DEVICE, &card.pci))
        return;
    pci_bars(card.pci, bars);
    card.registers = map_device(bars[0].address, bars[0].length);
    set(CTRL, CTRL_RST);
    set(IMC, ~0u);
    set(CTRL, CTRL_SLU);
    memset((void *)receive, 0, sizeof receive);
    memset((void *)transmit, 0, sizeof transmit);
    for (u32 i = 0; i < ENTRIES; i++)
        receive[i].buffer = (u64)received_frames[i];
    ring(RDBAL, receive);
    ring(TDBAL, transmit);
    memcpy(&low, OWN_ADDRESS, 4);
    memcpy(&high, OWN_ADDRESS + 4, 2);
    set(RAL, low);
    set(RAH, high | RAH_AV);
    set(RCTL, RCTL_EN | RCTL_BAM | RCTL_SECRC);
    set(TCTL, TCTL_EN | TCTL_PSP);
    set(RDBAL + TAIL, ENTRIES - 1);
    set(IMS, ICR_RXT0);
}

void intel_begin(u32 check)
{
    card.busy = card.registers && check % 2 == 0;
    for (u32 i = 0; card.busy && i < UNDER_WAY; i++)
        send();
}

static int has_reached(void *goal)
{
    return card.back >= *(u32 *)goal;
}

void intel_end(void)
{
    enum { PATIENCE = 20000000 };
    if (!card.busy)
        return;
    u32 goal = card.back + UNDER_WAY;
    card.stalls += !wait_until(has_reached, &goal, PATIENCE);
    card.busy = 0;
    card.stalls += !wait_until(has_reached, &card.sent, PATIENCE);
}

/* The interrupt controller's input for a slot below 25: four inputs serve them (`_PRT`). */
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
    if (!(get(ICR) & ICR_RXT0))
        return 0;
    card.interrupts++;
    while (receive[card.back % ENTRIES].status & STATUS_DD) {
        take(card.back % ENTRIES);
        if (card.busy)
            send();
    }
    return 1;
}

void intel_stop(void)
{
    enum { LEAST = 200 };
    if (!card.registers)
        return;
    int good = card.back >= LEAST && !card.wrong && !card.unsent && !card.stalls;
    check(good, intel_shares_line(nic.pci) ? "on_one_line" : "beside",
          "back=%u wrong=%u unsent=%u stalls=%u interrupts=%u", card.back, card.wrong, card.unsent,
          card.stalls, card.interrupts);
    set(IMC, ~0u);
    set(RCTL, 0);
    set(CTRL, CTRL_RST);
    pci_write(card.pci, PCI_COMMAND, COMMAND_NO_INTX);
    card.registers = NULL;
}

/* Moves the BARs of a stopped device as Windows 11 25H2 may: over each other and over those of
 * another device, with decoding on or off, one half of a 64-bit BAR after the other. */
#include "machine.h"

enum { BAR_TYPE = 7, BAR_64_BIT = 4, BAR_FLAGS = 15, MAX_LENGTH = 0x10000 };
/* Places that the machine does not use: below 4 GiB and above 128 GiB. */
enum { LOW_PLACE = 0xc8000000, PLACE_LENGTH = 0x100000 };
#define HIGH_PLACE (0x2000000000ull | LOW_PLACE)
enum { DECODING_ON = 1, HIGH_HALF_FIRST = 1, PLACE_HIGH = 1 };

static int is_wide(PciAddress where, const PciBar *bar)
{
    return (pci_read(where, PCI_BAR0 + 4 * bar->number) & BAR_TYPE) == BAR_64_BIT;
}

static void write_bar(PciAddress where, const PciBar *bar, u64 address, int high_first)
{
    u32 low = PCI_BAR0 + 4 * bar->number;
    int wide = is_wide(where, bar);
    if (wide && high_first)
        pci_write(where, low + 4, address >> 32);
    pci_write(where, low, address);
    if (wide && !high_first)
        pci_write(where, low + 4, address >> 32);
}

static u64 read_bar(PciAddress where, const PciBar *bar)
{
    u32 low = PCI_BAR0 + 4 * bar->number;
    u64 high = is_wide(where, bar) ? pci_read(where, low + 4) : 0;
    return high << 32 | (pci_read(where, low) & ~(u32)BAR_FLAGS);
}

/* The address of a BAR below 4 GiB of another device; 0 if there is none. */
static u32 another_bar(PciAddress where)
{
    for (u8 device = 0; device < 32; device++)
        for (int number = 0; number < 6 && device != where.device; number++) {
            u32 bar = pci_read((PciAddress){device, 0}, PCI_BAR0 + 4 * number);
            if (bar != ~0u && !(bar & BAR_TYPE) && bar & ~(u32)BAR_FLAGS)
                return bar & ~(u32)BAR_FLAGS;
        }
    return 0;
}

int bars_move(PciAddress where, u32 turn)
{
    PciBar bars[6];
    u32 count = pci_bars(where, bars), over = another_bar(where), wrong = 0;
    u64 places[6];
    int decoding = turn & DECODING_ON, high_first = (turn >> 1 ^ turn) & HIGH_HALF_FIRST;
    pci_write(where, PCI_COMMAND, decoding ? COMMAND_MEMORY : 0);
    for (u32 i = 0; i < count; i++) {
        int high = turn & PLACE_HIGH && is_wide(where, &bars[i]);
        u64 own = (u64)PLACE_LENGTH * (turn * 32 + where.device) + bars[i].number * MAX_LENGTH;
        places[i] = (high ? HIGH_PLACE : LOW_PLACE) + own;
        if (bars[i].io || bars[i].length > MAX_LENGTH)
            places[i] = bars[i].address;
        else
            write_bar(where, &bars[i], over, high_first);
    }
    for (u32 i = count; i--;)
        if (!bars[i].io)
            write_bar(where, &bars[i], places[i], high_first);
    pci_write(where, PCI_COMMAND, COMMAND_MEMORY);
    pci_write(where, PCI_COMMAND, 0);
    for (u32 i = 0; i < count; i++)
        wrong += !bars[i].io && read_bar(where, &bars[i]) != places[i];
    print("# BARs moved to %llx, %llx over %x\n", places[0], places[count - 1], over);
    return !wrong;
}

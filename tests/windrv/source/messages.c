/* MSI-X: fills the table as Windows' PCI driver does. */
#include "machine.h"

enum { MSIX_ENABLE = 1u << 31, MSIX_MASK_ALL = 1u << 30 };
enum { TABLE_ADDRESS, TABLE_ADDRESS_HIGH, TABLE_DATA, TABLE_CONTROL, TABLE_WORDS };
enum { ENTRY_MASKED = 1, CAPABILITY_MSIX = 0x11 };

/* Each start uses the next vectors, so that a late message is not counted for another driver. */
static u32 next_vector;

static u32 take_vectors(u32 count)
{
    if (next_vector + count > LAST_VECTOR - MESSAGE_VECTOR)
        next_vector = 0;
    u32 first = MESSAGE_VECTOR + next_vector;
    next_vector += count;
    return first;
}

/* Entries without a message of their own share message 0, and are masked. */
static void fill_table(Interrupts *it)
{
    for (u32 number = 0; number < it->table_size; number++) {
        volatile u32 *entry = it->table + TABLE_WORDS * number;
        u32 message = number < it->messages ? number : 0;
        entry[TABLE_ADDRESS] = message_address(it->target[message]);
        entry[TABLE_ADDRESS_HIGH] = 0;
        entry[TABLE_DATA] = it->first_vector + message;
        entry[TABLE_CONTROL] = number < it->messages ? 0 : ENTRY_MASKED;
    }
}

void messages_find(Interrupts *it, PciAddress pci, const PciBar bars[], u32 count)
{
    it->pci = pci;
    it->capability = pci_capability(pci, CAPABILITY_MSIX);
    if (!it->capability)
        return;
    it->table_size = (pci_read(pci, it->capability) >> 16 & 0x7ff) + 1;
    u32 table = pci_read(pci, it->capability + 4);
    for (u32 i = 0; i < count; i++)
        if (bars[i].number == (int)(table & 7))
            it->table = map_device(bars[i].address + (table & ~7u), it->table_size * 16);
}

void messages_start(Interrupts *it, u32 wanted, int polled)
{
    if (wanted > MAX_MESSAGES)
        wanted = MAX_MESSAGES;
    it->messages = wanted < it->table_size ? wanted : it->table_size;
    if (!it->messages) {
        messages_stop(it);
        pci_write(it->pci, PCI_COMMAND, polled ? COMMAND_ON | COMMAND_NO_INTX : COMMAND_ON);
        return;
    }
    u32 control = pci_read(it->pci, it->capability) & ~(MSIX_ENABLE | MSIX_MASK_ALL);
    pci_write(it->pci, it->capability, control);
    it->first_vector = take_vectors(it->messages);
    u32 neighbours = it->neighbours ? it->neighbours : 1;
    for (u32 message = 0; message < it->messages; message++) {
        u32 number = it->first_processor + message / neighbours;
        it->target[message] = it->processors ? number % it->processors : 0;
        it->allowed[message] = 1 << it->target[message];
    }
    /* The table is filled while MSI-X is on but masked, and INTx is off. */
    pci_write(it->pci, PCI_COMMAND, COMMAND_ON | COMMAND_NO_INTX);
    pci_write(it->pci, it->capability, control | MSIX_ENABLE | MSIX_MASK_ALL);
    fill_table(it);
    for (u32 processor = 0; processor < PROCESSORS; processor++)
        for (u32 message = 0; message < it->messages; message++)
            it->seen[processor][message] = interrupt_counts[processor][it->first_vector + message];
    pci_write(it->pci, it->capability, control | MSIX_ENABLE);
}

int message_arrived(Interrupts *it, u32 message)
{
    u32 me = this_processor(), *seen = &it->seen[me][message];
    volatile u32 *count = &interrupt_counts[me][it->first_vector + message];
    if (*count == *seen)
        return 0;
    ++*seen;
    COUNT(it->fired[message]);
    it->taken[me]++;
    if (!(it->allowed[message] >> me & 1))
        COUNT(it->misrouted);
    return 1;
}

void message_move(Interrupts *it, u32 message, u32 processor)
{
    volatile u32 *entry = it->table + TABLE_WORDS * message;
    it->allowed[message] |= 1 << processor;
    it->target[message] = processor;
    entry[TABLE_CONTROL] = ENTRY_MASKED;
    entry[TABLE_ADDRESS] = message_address(processor);
    entry[TABLE_CONTROL] = 0;
}

void messages_moved(Interrupts *it)
{
    for (u32 message = 0; message < it->messages; message++)
        it->allowed[message] = 1 << it->target[message];
}

void message_mask(Interrupts *it, u32 message, int masked)
{
    it->table[TABLE_WORDS * message + TABLE_CONTROL] = masked ? ENTRY_MASKED : 0;
}

void messages_stop(Interrupts *it)
{
    if (it->capability) {
        u32 control = pci_read(it->pci, it->capability) & ~(MSIX_ENABLE | MSIX_MASK_ALL);
        pci_write(it->pci, it->capability, control);
    }
    pci_write(it->pci, PCI_COMMAND, COMMAND_NO_INTX);
}

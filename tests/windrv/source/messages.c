/* MSI-X: fills the table as Windows' PCI driver does. */
#include "port.h"

enum { MSIX_ENABLE = 1u << 31, MSIX_MASK_ALL = 1u << 30 };
enum { TABLE_ADDRESS, TABLE_ADDRESS_HIGH, TABLE_DATA, TABLE_CONTROL, TABLE_WORDS };
enum { ENTRY_MASKED = 1 };

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
        entry[TABLE_ADDRESS] = message_address();
        entry[TABLE_ADDRESS_HIGH] = 0;
        entry[TABLE_DATA] = it->first_vector + message;
        entry[TABLE_CONTROL] = number < it->messages ? 0 : ENTRY_MASKED;
    }
}

void messages_start(Adapter *adapter)
{
    Interrupts *it = &adapter->interrupts;
    u32 wanted = adapter->mode.messages;
    if (wanted > MAX_MESSAGES)
        wanted = MAX_MESSAGES;
    it->messages = wanted < it->table_size ? wanted : it->table_size;
    if (!it->capability)
        return;
    u32 control = pci_read(adapter->pci, it->capability) & ~(MSIX_ENABLE | MSIX_MASK_ALL);
    pci_write(adapter->pci, it->capability, control);
    if (!it->messages) {
        u32 command = adapter->mode.polled ? COMMAND_ON | COMMAND_NO_INTX : COMMAND_ON;
        pci_write(adapter->pci, PCI_COMMAND, command);
        return;
    }
    it->first_vector = take_vectors(it->messages);
    /* The table is filled while MSI-X is on but masked, and INTx is off. */
    pci_write(adapter->pci, PCI_COMMAND, COMMAND_ON | COMMAND_NO_INTX);
    pci_write(adapter->pci, it->capability, control | MSIX_ENABLE | MSIX_MASK_ALL);
    fill_table(it);
    for (u32 message = 0; message < it->messages; message++)
        it->seen[message] = interrupt_counts[it->first_vector + message];
    pci_write(adapter->pci, it->capability, control | MSIX_ENABLE);
}

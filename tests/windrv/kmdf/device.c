/* One device: found, started, put to sleep and removed in the order in which KMDF does it. */
#include "kmdf.h"
#include <wdmguid.h>

#pragma GCC diagnostic ignored "-Wattributes"

typedef struct {
    Object object;
    WDF_DRIVER_CONFIG config;
} Driver;

Device *running;
static Driver *driver;
static PciAddress found_at;
static KIRQL const DEVICE_LEVEL = 5;

NTSTATUS WdfDriverCreate(PDRIVER_OBJECT, PUNICODE_STRING, PWDF_OBJECT_ATTRIBUTES attributes,
                         PWDF_DRIVER_CONFIG config, WDFDRIVER *handle)
{
    driver = object_new(DRIVER, sizeof *driver, NULL, attributes);
    driver->config = *config;
    if (handle)
        *handle = (WDFDRIVER)driver;
    return STATUS_SUCCESS;
}

void *driver_object(void)
{
    return driver;
}

VOID WdfDeviceInitSetPnpPowerEventCallbacks(PWDFDEVICE_INIT init,
                                            PWDF_PNPPOWER_EVENT_CALLBACKS events)
{
    init->events = *events;
}

VOID WdfDeviceInitSetIoType(PWDFDEVICE_INIT, WDF_DEVICE_IO_TYPE)
{
}

NTSTATUS WdfDeviceCreate(PWDFDEVICE_INIT *init, PWDF_OBJECT_ATTRIBUTES attributes,
                         WDFDEVICE *handle)
{
    void *parent = (*init)->is_child ? (void *)running : driver;
    Device *device = object_new(DEVICE, sizeof *device, parent, attributes);
    device->pci = found_at;
    device->events = (*init)->events;
    device->child_config = (*init)->child_config;
    device->file_config = (*init)->file_config;
    if (!(*init)->is_child)
        running = device;
    *init = NULL;
    *handle = (WDFDEVICE)device;
    return STATUS_SUCCESS;
}

WDFDRIVER WdfDeviceGetDriver(WDFDEVICE)
{
    return (WDFDRIVER)driver;
}

NTSTATUS WdfDeviceCreateDeviceInterface(WDFDEVICE, const GUID *, PCUNICODE_STRING)
{
    return STATUS_SUCCESS;
}

ULONG WdfDeviceGetAlignmentRequirement(WDFDEVICE)
{
    return 0;
}

/* The property says whether DMA is remapped, which needs an IOMMU. */
NTSTATUS WdfDeviceQueryPropertyEx(WDFDEVICE, WDF_DEVICE_PROPERTY_DATA *, ULONG, PVOID, PULONG,
                                  DEVPROPTYPE *)
{
    return STATUS_OBJECT_NAME_NOT_FOUND;
}

/* The interface of the bus, with which the library reads configuration space. */

static ULONG get_bus_data(PVOID, ULONG, PVOID buffer, ULONG offset, ULONG length)
{
    for (u32 i = 0; i < length; i++)
        ((u8 *)buffer)[i] = pci_read(running->pci, (offset + i) & ~3u) >> (offset + i) % 4 * 8;
    return length;
}

NTSTATUS WdfFdoQueryForInterface(WDFDEVICE, const GUID *, PINTERFACE to, USHORT size, USHORT, PVOID)
{
    BUS_INTERFACE_STANDARD *bus = (BUS_INTERFACE_STANDARD *)to;
    memset(bus, 0, size);
    bus->GetBusData = get_bus_data;
    return STATUS_SUCCESS;
}

PVOID MmMapIoSpaceEx(PHYSICAL_ADDRESS address, SIZE_T length, ULONG)
{
    return map_device(address.QuadPart, length);
}

VOID MmUnmapIoSpace(PVOID, SIZE_T)
{
}

/* Resources: BARs and interrupts, in the form in which PnP passes them. */

ULONG WdfCmResourceListGetCount(WDFCMRESLIST)
{
    return running->resource_count;
}

PCM_PARTIAL_RESOURCE_DESCRIPTOR WdfCmResourceListGetDescriptor(WDFCMRESLIST, ULONG number)
{
    return number < running->resource_count ? &running->resources[number] : NULL;
}

static void list_resources(void)
{
    u32 count = 0, interrupts = running->interrupts.messages ? running->interrupts.messages : 1;
    for (u32 i = 0; i < running->bar_count; i++) {
        PciBar *bar = &running->bars[i];
        CM_PARTIAL_RESOURCE_DESCRIPTOR *to = &running->resources[count++];
        to->Type = bar->io ? CmResourceTypePort : CmResourceTypeMemory;
        to->Flags = bar->io ? CM_RESOURCE_PORT_IO : 0;
        to->u.Memory.Start.QuadPart = bar->address;
        to->u.Memory.Length = bar->length;
    }
    for (u32 i = 0; i < interrupts; i++) {
        CM_PARTIAL_RESOURCE_DESCRIPTOR *to = &running->resources[count++];
        to->Type = CmResourceTypeInterrupt;
        to->Flags = CM_RESOURCE_INTERRUPT_LEVEL_SENSITIVE;
        if (running->interrupts.messages)
            to->Flags = CM_RESOURCE_INTERRUPT_LATCHED | CM_RESOURCE_INTERRUPT_MESSAGE;
    }
    running->resource_count = count;
}

/* Interrupts. Each interrupt object has a message. With fewer messages, and with INTx, the others
 * are not connected. */

NTSTATUS WdfInterruptCreate(WDFDEVICE device, PWDF_INTERRUPT_CONFIG config,
                            PWDF_OBJECT_ATTRIBUTES attributes, WDFINTERRUPT *handle)
{
    if (running->handler_count == MAX_INTERRUPTS)
        return STATUS_INSUFFICIENT_RESOURCES;
    Interrupt *interrupt = object_new(INTERRUPT, sizeof *interrupt, device, attributes);
    interrupt->config = *config;
    interrupt->number = running->handler_count;
    running->handlers[running->handler_count++] = interrupt;
    *handle = (WDFINTERRUPT)interrupt;
    return STATUS_SUCCESS;
}

WDFDEVICE WdfInterruptGetDevice(WDFINTERRUPT handle)
{
    return (WDFDEVICE)((Object *)object_of(handle, INTERRUPT))->parent;
}

VOID WdfInterruptGetInfo(WDFINTERRUPT handle, PWDF_INTERRUPT_INFO info)
{
    u32 number = ((Interrupt *)object_of(handle, INTERRUPT))->number;
    Interrupts *it = &running->interrupts;
    memset(info, 0, sizeof *info);
    if (number < it->messages)
        *info = (WDF_INTERRUPT_INFO){1, number, it->first_vector + number};
    else if (!it->messages && !number)
        info->Vector = INTX_VECTOR;
}

BOOLEAN WdfInterruptQueueDpcForIsr(WDFINTERRUPT handle)
{
    Interrupt *interrupt = object_of(handle, INTERRUPT);
    u32 nowhere = 0, here = this_processor() + 1;
    return __atomic_compare_exchange_n(&interrupt->dpc_queued, &nowhere, here, 0, __ATOMIC_ACQ_REL,
                                       __ATOMIC_RELAXED);
}

/* Calls a handler at its level, or its callback that enables or disables it. */
static BOOLEAN service(Interrupt *interrupt)
{
    KIRQL before = irql;
    irql = DEVICE_LEVEL;
    count_if(!spin_lock(&interrupt->lock), &mistakes.locks);
    BOOLEAN claimed = interrupt->config.EvtInterruptIsr((WDFINTERRUPT)interrupt, interrupt->number);
    count_if(!spin_unlock(&interrupt->lock), &mistakes.locks);
    irql = before;
    return claimed;
}

u32 configuration_causes, intx_withdrawn, dpcs_run[PROCESSORS];
static volatile int forgets;
/* A processor has its lock while it polls, and the first one has all of them behind the gate. */
static int polling[PROCESSORS];
static u32 gates;

void gate_close(void)
{
    if (gates++)
        return;
    for (u32 i = 0; i < processors_running; i++)
        spin_lock(&polling[i]);
}

void gate_open(void)
{
    if (--gates)
        return;
    for (u32 i = 0; i < processors_running; i++)
        spin_unlock(&polling[i]);
}

/* Called by driver/cause.c. */
void cause_seen(UCHAR status)
{
    enum { CONFIGURATION = 2 };
    count_if(status & CONFIGURATION, &configuration_causes);
}

/* With INTx. The first call takes what has just come. */
int handler_claims_nothing(void)
{
    service(running->handlers[0]);
    return service(running->handlers[0]);
}

static int poll_messages(void)
{
    Interrupts *it = &running->interrupts;
    int any = 0;
    for (u32 message = 0; message < it->messages && message < running->handler_count; message++)
        while (message_arrived(it, message)) {
            any = 1;
            count_if(!service(running->handlers[message]), &it->unclaimed_messages);
        }
    return any;
}

static int poll_intx(void)
{
    Interrupts *it = &running->interrupts;
    int any = 0;
    for (u32 pin = 0; pin < INTX_PINS; pin++) {
        volatile u32 *count = &interrupt_counts[this_processor()][INTX_VECTOR + pin];
        if (!*count)
            continue;
        *count = 0;
        any = 1;
        it->intx_fired++;
        it->intx_ended_early += !is_in_service(INTX_VECTOR + pin);
        it->intx_unclaimed += !service(running->handlers[0]);
        end_of_interrupt_intx();
    }
    return any;
}

/* Ends interrupts that came before the device was switched off: after it is on again, its driver
 * would find no cause. */
static void forget_here(void)
{
    volatile u32 *counts = interrupt_counts[this_processor()];
    allow_interrupts();
    for (u32 pin = 0; pin < INTX_PINS; pin++) {
        if (!counts[INTX_VECTOR + pin])
            continue;
        counts[INTX_VECTOR + pin] = 0;
        intx_withdrawn++;
        if (is_in_service(INTX_VECTOR + pin))
            end_of_interrupt_intx();
    }
    forgets = 0;
}

static void forget_intx(void)
{
    u32 target = running->interrupts.first_processor;
    if (target == this_processor()) {
        forget_here();
        return;
    }
    forgets = 1;
    while (forgets)
        processor_wake(target);
}

static int poll_interrupts(void)
{
    if (!running->handler_count || !running->handlers[0]->connected)
        return 0;
    return running->interrupts.messages ? poll_messages() : poll_intx();
}

static int poll_dpcs(void)
{
    int any = 0;
    u32 me = this_processor();
    for (u32 i = 0; i < running->handler_count; i++) {
        Interrupt *interrupt = running->handlers[i];
        if (interrupt->dpc_queued != me + 1)
            continue;
        interrupt->dpc_running = me + 1;
        interrupt->dpc_queued = 0;
        any = 1;
        dpcs_run[me]++;
        irql = DISPATCH_LEVEL;
        interrupt->config.EvtInterruptDpc((WDFINTERRUPT)interrupt, running);
        irql = PASSIVE_LEVEL;
        interrupt->dpc_running = 0;
    }
    return any;
}

int device_poll(void)
{
    int any = 0;
    u32 me = this_processor();
    if (irql > APC_LEVEL || !spin_lock(&polling[me]))
        return 0;
    if (forgets && me)
        forget_here();
    if (running) {
        any = poll_interrupts();
        any |= poll_dpcs();
    }
    spin_unlock(&polling[me]);
    return any;
}

/* Runs the DPCs that are queued, and waits for those of other processors. */
static void flush_dpcs(void)
{
    for (u32 i = 0; i < running->handler_count; i++)
        while (running->handlers[i]->dpc_queued || running->handlers[i]->dpc_running)
            device_poll();
}

static void connect(int on)
{
    gate_close();
    for (u32 i = 0; i < running->handler_count; i++) {
        Interrupt *interrupt = running->handlers[i];
        EVT_WDF_INTERRUPT_ENABLE *event =
            on ? interrupt->config.EvtInterruptEnable : interrupt->config.EvtInterruptDisable;
        if (i && i >= running->interrupts.messages)
            continue;
        irql = DEVICE_LEVEL;
        if (event)
            event((WDFINTERRUPT)interrupt, (WDFDEVICE)running);
        irql = PASSIVE_LEVEL;
        interrupt->connected = on;
    }
    gate_open();
}

/* Power states. */

static const char *power_up(WDF_POWER_DEVICE_STATE before)
{
    WDFDEVICE device = (WDFDEVICE)running;
    WDF_PNPPOWER_EVENT_CALLBACKS *events = &running->events;
    if (!NT_SUCCESS(events->EvtDeviceD0Entry(device, before)))
        return "EvtDeviceD0Entry";
    connect(1);
    if (events->EvtDeviceD0EntryPostInterruptsEnabled &&
        !NT_SUCCESS(events->EvtDeviceD0EntryPostInterruptsEnabled(device, before)))
        return "EvtDeviceD0EntryPostInterruptsEnabled";
    queues_start(running);
    return children_up();
}

static const char *power_down(WDF_POWER_DEVICE_STATE target)
{
    WDFDEVICE device = (WDFDEVICE)running;
    WDF_PNPPOWER_EVENT_CALLBACKS *events = &running->events;
    u32 action =
        target == WdfPowerDeviceD3 ? WdfRequestStopActionSuspend : WdfRequestStopActionPurge;
    const char *failed = children_down(target, action);
    if (failed)
        return failed;
    /* viorng expects no DPC between the stop of its requests and that of its interrupts. */
    gate_close();
    int stopped = queues_stop(running, action);
    if (events->EvtDeviceD0ExitPreInterruptsDisabled) {
        gate_open();
        events->EvtDeviceD0ExitPreInterruptsDisabled(device, target);
        gate_close();
    }
    connect(0);
    gate_open();
    flush_dpcs();
    if (!stopped)
        return "EvtIoStop";
    events->EvtDeviceD0Exit(device, target);
    used_forget();
    return NULL;
}

const char *device_sleep(void)
{
    const char *failed = power_down(WdfPowerDeviceD3);
    messages_stop(&running->interrupts);
    forget_intx();
    return failed;
}

/* Windows restores BARs, command and MSI-X before the driver's turn. */
const char *device_wake(void)
{
    messages_start(&running->interrupts, running->interrupts.messages, 0);
    return power_up(WdfPowerDeviceD3);
}

const char *device_start(PciAddress where, DriverStart *start, u32 messages, u32 processors)
{
    static UNICODE_STRING registry;
    struct Init init = {0};
    found_at = where;
    running = NULL;
    if (!NT_SUCCESS(start(NULL, &registry)) || !driver)
        return "DriverEntry";
    if (!NT_SUCCESS(driver->config.EvtDriverDeviceAdd((WDFDRIVER)driver, &init)) || !running)
        return "EvtDriverDeviceAdd";
    running->interrupts.processors = processors;
    running->interrupts.first_processor = processors > 1;
    intx_route(processors > 1);
    processors_idle(device_poll);
    running->bar_count = pci_bars(where, running->bars);
    messages_find(&running->interrupts, where, running->bars, running->bar_count);
    messages_start(&running->interrupts, messages, 0);
    list_resources();
    if (!NT_SUCCESS(running->events.EvtDevicePrepareHardware((WDFDEVICE)running, NULL, NULL)))
        return "EvtDevicePrepareHardware";
    return power_up(WdfPowerDeviceD3Final);
}

const char *device_remove(int surprise)
{
    if (surprise && running->events.EvtDeviceSurpriseRemoval)
        running->events.EvtDeviceSurpriseRemoval((WDFDEVICE)running);
    const char *failed = power_down(WdfPowerDeviceD3Final);
    children_remove();
    queues_purge(running);
    running->events.EvtDeviceReleaseHardware((WDFDEVICE)running, NULL);
    messages_stop(&running->interrupts);
    forget_intx();
    gate_close();
    WdfObjectDelete(driver);
    running = NULL;
    driver = NULL;
    gate_open();
    intx_route(0);
    return failed;
}

#define IMPORT(name) void *__imp_##name = (void *)name
IMPORT(MmUnmapIoSpace);

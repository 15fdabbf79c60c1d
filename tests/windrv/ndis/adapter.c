/* One adapter: found, started, paused, put to sleep, reset and halted in the order in which NDIS
 * does it, and asked by OIDs. */
#include "shim.h"

Nic nic;
static struct {
    PNDIS_OID_REQUEST request;
    NDIS_STATUS status;
    volatile int complete;
} asked;
enum { ANSWER_MICROSECONDS = 20000000 };

NTSTATUS netkvm_entry(PDRIVER_OBJECT, PUNICODE_STRING);

NDIS_STATUS NdisMRegisterMiniportDriver(PDRIVER_OBJECT, PUNICODE_STRING, NDIS_HANDLE,
                                        NDIS_MINIPORT_DRIVER_CHARACTERISTICS *driver,
                                        PNDIS_HANDLE handle)
{
    nic.driver = *driver;
    *handle = &nic;
    return driver->SetOptionsHandler ? driver->SetOptionsHandler(&nic, NULL) : NDIS_STATUS_SUCCESS;
}

VOID NdisMDeregisterMiniportDriver(NDIS_HANDLE)
{
    memset(&nic.driver, 0, sizeof nic.driver);
}

/* Of the handlers for PnP, the checks use none: the driver only spreads messages over processors,
 * as `interrupts_connect` does. */
NDIS_STATUS NdisSetOptionalHandlers(NDIS_HANDLE, PNDIS_DRIVER_OPTIONAL_HANDLERS)
{
    return NDIS_STATUS_SUCCESS;
}

NDIS_STATUS NdisMSetMiniportAttributes(NDIS_HANDLE, NDIS_MINIPORT_ADAPTER_ATTRIBUTES *attributes)
{
    Told *told = &nic.told;
    level_at_most(PASSIVE_LEVEL, "NdisMSetMiniportAttributes");
    switch (attributes->Header.Type) {
    case NDIS_OBJECT_TYPE_MINIPORT_ADAPTER_REGISTRATION_ATTRIBUTES:
        nic.context = attributes->RegistrationAttributes.MiniportAdapterContext;
        break;
    case NDIS_OBJECT_TYPE_MINIPORT_ADAPTER_GENERAL_ATTRIBUTES:
        told->general = attributes->GeneralAttributes;
        told->link.MediaConnectState = told->general.MediaConnectState;
        told->link.XmitLinkSpeed = told->general.XmitLinkSpeed;
        if (told->general.RecvScaleCapabilities)
            told->scale = *told->general.RecvScaleCapabilities;
        break;
    case NDIS_OBJECT_TYPE_MINIPORT_ADAPTER_OFFLOAD_ATTRIBUTES:
        told->has_offload = 1;
        told->offload = *attributes->OffloadAttributes.DefaultOffloadConfiguration;
        break;
    default:
        mistakes.unsupported++;
    }
    return NDIS_STATUS_SUCCESS;
}

VOID NdisMRemoveMiniport(NDIS_HANDLE)
{
    nic.told.removal = 1;
}

VOID NdisMIndicateStatusEx(NDIS_HANDLE, PNDIS_STATUS_INDICATION status)
{
    level_at_most(DISPATCH_LEVEL, "NdisMIndicateStatusEx");
    if (status->StatusCode == NDIS_STATUS_LINK_STATE) {
        nic.told.link = *(NDIS_LINK_STATE *)status->StatusBuffer;
        nic.told.link_changes++;
    } else if (status->StatusCode == NDIS_STATUS_TASK_OFFLOAD_CURRENT_CONFIG) {
        nic.told.offload = *(NDIS_OFFLOAD *)status->StatusBuffer;
        nic.told.offload_changes++;
    } else {
        mistakes.unsupported++;
    }
}

VOID NdisWriteErrorLogEntry(NDIS_HANDLE, ULONG code, ULONG, ...)
{
    print("# netkvm: an entry for the event log: %x\n", code);
    nic.told.errors++;
}

/* The bus. */

ULONG NdisMGetBusData(NDIS_HANDLE, ULONG, ULONG offset, PVOID buffer, ULONG length)
{
    for (u32 i = 0; i < length; i++)
        ((u8 *)buffer)[i] = pci_read(nic.pci, (offset + i) & ~3u) >> (offset + i) % 4 * 8;
    return length;
}

NDIS_STATUS NdisMMapIoSpace(PVOID *to, NDIS_HANDLE, NDIS_PHYSICAL_ADDRESS address, UINT length)
{
    level_at_most(PASSIVE_LEVEL, "NdisMMapIoSpace");
    *to = map_device(address.QuadPart, length);
    return NDIS_STATUS_SUCCESS;
}

VOID NdisMUnmapIoSpace(NDIS_HANDLE, PVOID, UINT)
{
}

NDIS_STATUS NdisMRegisterIoPortRange(PVOID *, NDIS_HANDLE, UINT, UINT)
{
    return NDIS_STATUS_NOT_SUPPORTED;
}

VOID NdisMDeregisterIoPortRange(NDIS_HANDLE, UINT, UINT, PVOID)
{
}

ULONG ndis_port(ULONG_PTR port)
{
    print("fail netkvm: port %llx is used, but the device has none\n", port);
    machine_end();
    return 0;
}

/* Resources: BARs and interrupts. */
static PNDIS_RESOURCE_LIST resources(void)
{
    static struct {
        NDIS_RESOURCE_LIST list;
        CM_PARTIAL_RESOURCE_DESCRIPTOR more[MAX_RESOURCES];
    } it;
    memset(&it, 0, sizeof it);
    CM_PARTIAL_RESOURCE_DESCRIPTOR *to = it.list.PartialDescriptors;
    for (u32 i = 0; i < nic.bar_count; i++, to++) {
        to->Type = nic.bars[i].io ? CmResourceTypePort : CmResourceTypeMemory;
        to->u.Memory.Start.QuadPart = nic.bars[i].address;
        to->u.Memory.Length = nic.bars[i].length;
    }
    u32 messages = nic.interrupts.messages;
    for (u32 i = 0; i < (messages ? messages : 1); i++, to++) {
        to->Type = CmResourceTypeInterrupt;
        to->Flags = messages ? CM_RESOURCE_INTERRUPT_LATCHED | CM_RESOURCE_INTERRUPT_MESSAGE
                             : CM_RESOURCE_INTERRUPT_LEVEL_SENSITIVE;
    }
    it.list.Count = to - it.list.PartialDescriptors;
    return &it.list;
}

const char *nic_start(PciAddress where, NicMode mode)
{
    static UNICODE_STRING registry;
    NDIS_MINIPORT_INIT_PARAMETERS parameters = {0};
    memset(&nic, 0, sizeof nic);
    nic.pci = where;
    nic.mode = mode;
    nic.interrupts.processors = mode.together ? mode.processors : 1;
    nic.interrupts.neighbours = MESSAGES_OF_A_PROCESSOR;
    interrupts_forget();
    active_processors = mode.processors;
    if (netkvm_entry(NULL, &registry) != STATUS_SUCCESS)
        return "DriverEntry";
    nic.bar_count = pci_bars(where, nic.bars);
    messages_find(&nic.interrupts, where, nic.bars, nic.bar_count);
    messages_start(&nic.interrupts, mode.messages, 0);
    interrupts_connect(mode.processors, mode.together);
    processors_idle(ndis_poll);
    parameters.AllocatedResources = resources();
    if (nic.driver.InitializeHandlerEx(&nic, NULL, &parameters) != NDIS_STATUS_SUCCESS)
        return "MiniportInitializeEx";
    return nic_restart();
}

/* The other processors must not look for messages meanwhile. */
static void switch_messages(int on)
{
    processors_hold();
    if (on)
        messages_start(&nic.interrupts, nic.interrupts.messages, 0);
    else
        messages_stop(&nic.interrupts);
    processors_release();
}

const char *nic_restart(void)
{
    NDIS_MINIPORT_RESTART_PARAMETERS parameters = {0};
    nic.running = 1;
    if (nic.driver.RestartHandler(nic.context, &parameters) != NDIS_STATUS_SUCCESS)
        return "MiniportRestart";
    return NULL;
}

const char *nic_pause(void)
{
    NDIS_MINIPORT_PAUSE_PARAMETERS parameters = {0};
    if (nic.driver.PauseHandler(nic.context, &parameters) != NDIS_STATUS_SUCCESS)
        return "MiniportPause";
    nic.running = 0;
    return NULL;
}

const char *nic_stop(void)
{
    const char *failed = nic.running ? nic_pause() : NULL;
    nic.driver.HaltHandlerEx(nic.context, NdisHaltDeviceDisabled);
    switch_messages(0);
    interrupts_forget();
    nic.driver.UnloadHandler(NULL);
    used_forget();
    return failed;
}

const char *nic_reset(void)
{
    BOOLEAN addressing = FALSE;
    if (nic.driver.ResetHandlerEx(nic.context, &addressing) != NDIS_STATUS_SUCCESS)
        return "MiniportResetEx";
    return addressing ? "an addressing reset, which the driver does not ask for" : NULL;
}

/* NDIS pauses no driver that says NO_PAUSE_ON_SUSPEND. */
const char *nic_sleep(void)
{
    NDIS_DEVICE_POWER_STATE state = NdisDeviceStateD3;
    NDIS_STATUS status = nic_set(OID_PNP_SET_POWER, &state, sizeof state);
    switch_messages(0);
    return status == NDIS_STATUS_SUCCESS ? NULL : "OID_PNP_SET_POWER D3";
}

/* Windows restores BARs, command and MSI-X before the driver's turn. */
const char *nic_wake(void)
{
    NDIS_DEVICE_POWER_STATE state = NdisDeviceStateD0;
    switch_messages(1);
    NDIS_STATUS status = nic_set(OID_PNP_SET_POWER, &state, sizeof state);
    return status == NDIS_STATUS_SUCCESS ? NULL : "OID_PNP_SET_POWER D0";
}

/* Requests. */

VOID NdisMOidRequestComplete(NDIS_HANDLE, PNDIS_OID_REQUEST request, NDIS_STATUS status)
{
    level_at_most(DISPATCH_LEVEL, "NdisMOidRequestComplete");
    mistakes.requests += request != asked.request || asked.complete;
    asked.status = status;
    asked.complete = 1;
}

static int answered(void *)
{
    return asked.complete;
}

static NDIS_STATUS ask(PNDIS_OID_REQUEST request)
{
    request->Header.Type = NDIS_OBJECT_TYPE_OID_REQUEST;
    request->Header.Revision = NDIS_OID_REQUEST_REVISION_1;
    request->Header.Size = sizeof *request;
    asked.request = request;
    asked.complete = 0;
    NDIS_STATUS status = nic.driver.OidRequestHandler(nic.context, request);
    if (status != NDIS_STATUS_PENDING)
        return status;
    if (!wait_until(answered, NULL, ANSWER_MICROSECONDS)) {
        print("fail netkvm: OID %x got no answer\n", request->DATA.SET_INFORMATION.Oid);
        machine_end();
    }
    return asked.status;
}

NDIS_STATUS nic_set(NDIS_OID oid, void *from, u32 length)
{
    static NDIS_OID_REQUEST request;
    memset(&request, 0, sizeof request);
    request.RequestType = NdisRequestSetInformation;
    request.DATA.SET_INFORMATION.Oid = oid;
    request.DATA.SET_INFORMATION.InformationBuffer = from;
    request.DATA.SET_INFORMATION.InformationBufferLength = length;
    return ask(&request);
}

NDIS_STATUS nic_query(NDIS_OID oid, void *to, u32 length, u32 *written)
{
    static NDIS_OID_REQUEST request;
    memset(&request, 0, sizeof request);
    request.RequestType = NdisRequestQueryInformation;
    request.DATA.QUERY_INFORMATION.Oid = oid;
    request.DATA.QUERY_INFORMATION.InformationBuffer = to;
    request.DATA.QUERY_INFORMATION.InformationBufferLength = length;
    NDIS_STATUS status = ask(&request);
    if (written)
        *written = request.DATA.QUERY_INFORMATION.BytesWritten;
    return status;
}

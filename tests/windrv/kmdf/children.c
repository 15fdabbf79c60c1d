/* Devices that a bus driver finds on its bus, the programs that open them, and the names that
 * drivers give them. A child is described at any level, and created and started in a thread. */
#include "kmdf.h"

#pragma GCC diagnostic ignored "-Wattributes"

typedef PWDF_CHILD_IDENTIFICATION_DESCRIPTION_HEADER Description;
typedef struct Child {
    enum { DESCRIBED, STARTING, STARTED, ASLEEP, FAILED, MISSING } state;
    Device *device;
    struct Child *next;
    u64 description[]; /* begins with its header */
} Child;
struct File {
    Object object;
    Device *device;
};
static int bus_is_up;
u32 notifications;

VOID WdfFdoInitSetDefaultChildListConfig(PWDFDEVICE_INIT init, PWDF_CHILD_LIST_CONFIG config,
                                         PWDF_OBJECT_ATTRIBUTES)
{
    init->child_config = *config;
}

VOID WdfDeviceInitSetFileObjectConfig(PWDFDEVICE_INIT init, PWDF_FILEOBJECT_CONFIG config,
                                      PWDF_OBJECT_ATTRIBUTES)
{
    init->file_config = *config;
}

/* The handle of the list is that of the bus. */
WDFCHILDLIST WdfFdoGetDefaultChildList(WDFDEVICE bus)
{
    return (WDFCHILDLIST)bus;
}

static Child *find(WDFCHILDLIST list, Description description)
{
    Device *bus = object_of(list, DEVICE);
    for (Child *it = bus->children; it; it = it->next)
        if (it->state != MISSING && bus->child_config.EvtChildListIdentificationDescriptionCompare(
                                        list, (Description)it->description, description))
            return it;
    return NULL;
}

NTSTATUS WdfChildListAddOrUpdateChildDescriptionAsPresent(WDFCHILDLIST list,
                                                          Description description, PVOID)
{
    Device *bus = object_of(list, DEVICE);
    u64 size = bus->child_config.IdentificationDescriptionSize;
    level_at_most(DISPATCH_LEVEL, "WdfChildListAddOrUpdateChildDescriptionAsPresent");
    if (find(list, description))
        return STATUS_OBJECT_NAME_EXISTS;
    Child *child = pool_allocate(sizeof *child + size, 16);
    memset(child, 0, sizeof *child + size);
    Description copy = (Description)child->description;
    *copy = *description;
    child->next = bus->children;
    bus->children = child;
    return bus->child_config.EvtChildListIdentificationDescriptionDuplicate(list, description,
                                                                            copy);
}

NTSTATUS WdfChildListUpdateChildDescriptionAsMissing(WDFCHILDLIST list, Description description)
{
    Child *child = find(list, description);
    if (!child)
        return STATUS_NO_SUCH_DEVICE;
    child->state = MISSING;
    return STATUS_SUCCESS;
}

VOID WdfChildListBeginIteration(WDFCHILDLIST list, PWDF_CHILD_LIST_ITERATOR iterator)
{
    iterator->Next = ((Device *)object_of(list, DEVICE))->children;
}

/* Children without a device are left out. */
NTSTATUS WdfChildListRetrieveNextDevice(WDFCHILDLIST list, PWDF_CHILD_LIST_ITERATOR iterator,
                                        WDFDEVICE *handle, PWDF_CHILD_RETRIEVE_INFO info)
{
    Device *bus = object_of(list, DEVICE);
    for (Child *it = iterator->Next; it; it = it->next) {
        if (!it->device || it->state == MISSING)
            continue;
        iterator->Next = it->next;
        *handle = (WDFDEVICE)it->device;
        info->Status = 0;
        memcpy(info->IdentificationDescription, it->description,
               bus->child_config.IdentificationDescriptionSize);
        return STATUS_SUCCESS;
    }
    return STATUS_NO_MORE_ENTRIES;
}

VOID WdfChildListEndIteration(WDFCHILDLIST, PWDF_CHILD_LIST_ITERATOR)
{
}

/* Start, power, removal. */

static int power_up(Child *it, WDF_POWER_DEVICE_STATE before)
{
    if (!NT_SUCCESS(it->device->events.EvtDeviceD0Entry((WDFDEVICE)it->device, before)))
        return 0;
    it->state = STARTED;
    queues_start(it->device);
    return 1;
}

static Device *last_created(Device *bus)
{
    for (Object *it = bus->object.first_child; it; it = it->next_sibling)
        if (it->kind == DEVICE)
            return (Device *)it;
    return NULL;
}

static void start(void *context)
{
    Child *it = context;
    struct Init init = {.is_child = 1};
    it->state = FAILED;
    if (!NT_SUCCESS(running->child_config.EvtChildListCreateDevice(
            (WDFCHILDLIST)running, (Description)it->description, &init)))
        return;
    it->state = STARTING;
    it->device = last_created(running);
    if (!power_up(it, WdfPowerDeviceD3Final))
        it->state = FAILED;
}

int children_poll(void)
{
    int any = 0;
    for (Child *it = running && bus_is_up ? running->children : NULL; it; it = it->next)
        if (it->state == DESCRIBED) {
            it->state = STARTING;
            thread_start(start, it);
            any = 1;
        }
    return any;
}

const char *children_up(void)
{
    const char *failed = NULL;
    for (Child *it = running->children; it; it = it->next)
        if (it->state == ASLEEP && !power_up(it, WdfPowerDeviceD3))
            failed = "EvtDeviceD0Entry of a child";
    bus_is_up = 1;
    return failed;
}

static int is_starting(void)
{
    for (Child *it = running->children; it; it = it->next)
        if (it->state == STARTING)
            return 1;
    return 0;
}

const char *children_down(WDF_POWER_DEVICE_STATE target, u32 action)
{
    const char *failed = NULL;
    bus_is_up = 0;
    while (is_starting())
        pause_here();
    for (Child *it = running->children; it; it = it->next) {
        if (it->state != STARTED)
            continue;
        if (!queues_stop(it->device, action))
            failed = "EvtIoStop of a child";
        it->device->events.EvtDeviceD0Exit((WDFDEVICE)it->device, target);
        it->state = ASLEEP;
    }
    return failed;
}

/* Programs close their files after a removal by surprise. */
static void close_files(Device *device)
{
    for (Object *it = device->object.first_child, *next; it; it = next) {
        next = it->next_sibling;
        if (it->kind == OPEN_FILE)
            file_close((File *)it);
    }
}

void children_remove(void)
{
    work_items_finish();
    for (Child *it; (it = running->children);) {
        if (it->device) {
            close_files(it->device);
            queues_purge(it->device);
            WdfObjectDelete(it->device);
        }
        running->child_config.EvtChildListIdentificationDescriptionCleanup(
            (WDFCHILDLIST)running, (Description)it->description);
        running->children = it->next;
        pool_free(it);
    }
}

Device *child(u32 number)
{
    Child *it = running->children;
    for (; it && number; it = it->next)
        number--;
    return it && it->state == STARTED ? it->device : NULL;
}

WDF_DEVICE_PNP_STATE WdfDeviceGetDevicePnpState(WDFDEVICE handle)
{
    for (Child *it = running->children; it; it = it->next)
        if (it->device == object_of(handle, DEVICE) && it->state == STARTED)
            return WdfDevStatePnpStarted;
    return 0;
}

NTSTATUS IoReportTargetDeviceChangeAsynchronous(PDEVICE_OBJECT, PVOID,
                                                PDEVICE_CHANGE_COMPLETE_CALLBACK, PVOID)
{
    notifications++;
    return STATUS_SUCCESS;
}

/* Files. */

File *file_open(Device *device, NTSTATUS *status)
{
    Request *request = object_new(REQUEST, sizeof *request, NULL, NULL);
    File *file = object_new(OPEN_FILE, sizeof *file, device, NULL);
    request->state = OWNED;
    file->device = device;
    device->file_config.EvtDeviceFileCreate((WDFDEVICE)device, (WDFREQUEST)request,
                                            (WDFFILEOBJECT)file);
    mistakes.requests += request->state != DONE;
    *status = request->status;
    WdfObjectDelete(request);
    if (NT_SUCCESS(*status) && *status != STATUS_OBJECT_NAME_EXISTS)
        return file;
    WdfObjectDelete(file);
    return NULL;
}

void file_close(File *file)
{
    file->device->file_config.EvtFileClose((WDFFILEOBJECT)file);
    WdfObjectDelete(file);
}

WDFDEVICE WdfFileObjectGetDevice(WDFFILEOBJECT handle)
{
    return (WDFDEVICE)((File *)object_of(handle, OPEN_FILE))->device;
}

/* Text: names of devices, with %u and %ws alone. */

static void put(PUNICODE_STRING to, WCHAR letter)
{
    if (to->Length + 2 * sizeof letter <= to->MaximumLength)
        to->Buffer[to->Length / sizeof letter] = letter, to->Length += sizeof letter;
}

NTSTATUS RtlUnicodeStringPrintf(PUNICODE_STRING to, PCWSTR format, ...)
{
    va_list list;
    va_start(list, format);
    to->Length = 0;
    for (; *format; format++) {
        if (*format != '%') {
            put(to, *format);
            continue;
        }
        while (*++format != 'u' && *format != 's')
            ;
        if (*format == 's')
            for (const WCHAR *from = va_arg(list, const WCHAR *); *from; from++)
                put(to, *from);
        else
            put(to, '0' + va_arg(list, u32) % 10);
    }
    va_end(list);
    to->Buffer[to->Length / sizeof(WCHAR)] = 0;
    return STATUS_SUCCESS;
}

/* Windows' function copies what fits, and ends it with a zero. */
NTSTATUS RtlStringCbCopyA(PCHAR to, size_t length, PCSTR from)
{
    size_t count = strlen(from);
    if (!length)
        return STATUS_INVALID_PARAMETER;
    size_t copied = count < length ? count : length - 1;
    memcpy(to, from, copied);
    to[copied] = 0;
    return count < length ? STATUS_SUCCESS : STATUS_BUFFER_OVERFLOW;
}

NTSTATUS RtlAnsiStringToUnicodeString(PUNICODE_STRING to, PANSI_STRING from, BOOLEAN)
{
    level_at_most(PASSIVE_LEVEL, "RtlAnsiStringToUnicodeString");
    to->Length = from->Length * sizeof(WCHAR);
    to->MaximumLength = to->Length + sizeof(WCHAR);
    to->Buffer = pool_allocate(to->MaximumLength, 16);
    for (u32 i = 0; i < from->Length; i++)
        to->Buffer[i] = from->Buffer[i];
    to->Buffer[from->Length] = 0;
    return STATUS_SUCCESS;
}

VOID RtlFreeUnicodeString(PUNICODE_STRING string)
{
    pool_free(string->Buffer);
}

NTSTATUS WdfDeviceCreateSymbolicLink(WDFDEVICE handle, PCUNICODE_STRING name)
{
    Device *device = object_of(handle, DEVICE);
    u32 length = name->Length / sizeof(WCHAR);
    if (length >= sizeof device->link)
        return STATUS_INVALID_PARAMETER;
    for (u32 i = 0; i < length; i++)
        device->link[i] = name->Buffer[i];
    device->link[length] = 0;
    return STATUS_SUCCESS;
}

#define IMPORT(name) void *__imp_##name = (void *)name
IMPORT(IoReportTargetDeviceChangeAsynchronous);
IMPORT(RtlAnsiStringToUnicodeString);
IMPORT(RtlFreeUnicodeString);

/* KMDF's interface for bus drivers: child devices, files, lookaside lists. For `vioserial`. */
#ifndef WINDRV_WDF_BUS_H
#define WINDRV_WDF_BUS_H

WDF_HANDLE(WDFCHILDLIST);
WDF_HANDLE(WDFFILEOBJECT);
WDF_HANDLE(WDFLOOKASIDE);
WDF_HANDLE(WDFMEMORY);
WDF_HANDLE(WDFWAITLOCK);
#define WDF_NO_EVENT_CALLBACK NULL
typedef enum { WdfFalse, WdfTrue, WdfUseDefault } WDF_TRI_STATE;

/* Children: a driver describes them, and the framework creates a device for each. */

typedef struct {
    ULONG IdentificationDescriptionSize;
} WDF_CHILD_IDENTIFICATION_DESCRIPTION_HEADER, *PWDF_CHILD_IDENTIFICATION_DESCRIPTION_HEADER;
#define WDF_CHILD_IDENTIFICATION_DESCRIPTION_HEADER_INIT(it, size)                                 \
    ((it)->IdentificationDescriptionSize = (size))
typedef NTSTATUS EVT_WDF_CHILD_LIST_CREATE_DEVICE(WDFCHILDLIST,
                                                  PWDF_CHILD_IDENTIFICATION_DESCRIPTION_HEADER,
                                                  PWDFDEVICE_INIT);
typedef NTSTATUS EVT_WDF_CHILD_LIST_IDENTIFICATION_DESCRIPTION_DUPLICATE(
    WDFCHILDLIST, PWDF_CHILD_IDENTIFICATION_DESCRIPTION_HEADER source,
    PWDF_CHILD_IDENTIFICATION_DESCRIPTION_HEADER destination);
typedef BOOLEAN EVT_WDF_CHILD_LIST_IDENTIFICATION_DESCRIPTION_COMPARE(
    WDFCHILDLIST, PWDF_CHILD_IDENTIFICATION_DESCRIPTION_HEADER,
    PWDF_CHILD_IDENTIFICATION_DESCRIPTION_HEADER);
typedef VOID EVT_WDF_CHILD_LIST_IDENTIFICATION_DESCRIPTION_CLEANUP(
    WDFCHILDLIST, PWDF_CHILD_IDENTIFICATION_DESCRIPTION_HEADER);
typedef struct {
    ULONG IdentificationDescriptionSize;
    EVT_WDF_CHILD_LIST_CREATE_DEVICE *EvtChildListCreateDevice;
    EVT_WDF_CHILD_LIST_IDENTIFICATION_DESCRIPTION_DUPLICATE
    *EvtChildListIdentificationDescriptionDuplicate;
    EVT_WDF_CHILD_LIST_IDENTIFICATION_DESCRIPTION_COMPARE
    *EvtChildListIdentificationDescriptionCompare;
    EVT_WDF_CHILD_LIST_IDENTIFICATION_DESCRIPTION_CLEANUP
    *EvtChildListIdentificationDescriptionCleanup;
} WDF_CHILD_LIST_CONFIG, *PWDF_CHILD_LIST_CONFIG;
#define WDF_CHILD_LIST_CONFIG_INIT(it, size, create)                                               \
    (*(it) = (WDF_CHILD_LIST_CONFIG){(size), .EvtChildListCreateDevice = (create)})
typedef enum { WdfRetrievePresentChildren = 1 } WDF_RETRIEVE_CHILD_FLAGS;
typedef struct {
    ULONG Flags;
    PVOID Next;
} WDF_CHILD_LIST_ITERATOR, *PWDF_CHILD_LIST_ITERATOR;
#define WDF_CHILD_LIST_ITERATOR_INIT(it, flags) (*(it) = (WDF_CHILD_LIST_ITERATOR){(flags), NULL})
typedef struct {
    PWDF_CHILD_IDENTIFICATION_DESCRIPTION_HEADER IdentificationDescription;
    ULONG Status;
} WDF_CHILD_RETRIEVE_INFO, *PWDF_CHILD_RETRIEVE_INFO;
#define WDF_CHILD_RETRIEVE_INFO_INIT(it, header) (*(it) = (WDF_CHILD_RETRIEVE_INFO){(header), 0})
VOID WdfFdoInitSetDefaultChildListConfig(PWDFDEVICE_INIT, PWDF_CHILD_LIST_CONFIG,
                                         PWDF_OBJECT_ATTRIBUTES);
WDFCHILDLIST WdfFdoGetDefaultChildList(WDFDEVICE);
NTSTATUS
WdfChildListAddOrUpdateChildDescriptionAsPresent(WDFCHILDLIST,
                                                 PWDF_CHILD_IDENTIFICATION_DESCRIPTION_HEADER,
                                                 PVOID);
NTSTATUS WdfChildListUpdateChildDescriptionAsMissing(WDFCHILDLIST,
                                                     PWDF_CHILD_IDENTIFICATION_DESCRIPTION_HEADER);
VOID WdfChildListBeginIteration(WDFCHILDLIST, PWDF_CHILD_LIST_ITERATOR);
NTSTATUS WdfChildListRetrieveNextDevice(WDFCHILDLIST, PWDF_CHILD_LIST_ITERATOR, WDFDEVICE *,
                                        PWDF_CHILD_RETRIEVE_INFO);
VOID WdfChildListEndIteration(WDFCHILDLIST, PWDF_CHILD_LIST_ITERATOR);

/* Files: programs that opened a device. */

typedef VOID EVT_WDF_DEVICE_FILE_CREATE(WDFDEVICE, WDFREQUEST, WDFFILEOBJECT);
typedef VOID EVT_WDF_FILE_CLOSE(WDFFILEOBJECT);
typedef EVT_WDF_FILE_CLOSE EVT_WDF_FILE_CLEANUP;
typedef struct {
    EVT_WDF_DEVICE_FILE_CREATE *EvtDeviceFileCreate;
    EVT_WDF_FILE_CLOSE *EvtFileClose;
    EVT_WDF_FILE_CLEANUP *EvtFileCleanup;
} WDF_FILEOBJECT_CONFIG, *PWDF_FILEOBJECT_CONFIG;
#define WDF_FILEOBJECT_CONFIG_INIT(it, create, close, cleanup)                                     \
    (*(it) = (WDF_FILEOBJECT_CONFIG){(create), (close), (cleanup)})
VOID WdfDeviceInitSetFileObjectConfig(PWDFDEVICE_INIT, PWDF_FILEOBJECT_CONFIG,
                                      PWDF_OBJECT_ATTRIBUTES);
WDFDEVICE WdfFileObjectGetDevice(WDFFILEOBJECT);

/* What a child says of itself. Only its symbolic link is used. */

typedef struct {
    WDF_TRI_STATE NoDisplayInUI, Removable, EjectSupported, SurpriseRemovalOK;
    ULONG Address, UINumber;
} WDF_DEVICE_PNP_CAPABILITIES;
#define WDF_DEVICE_PNP_CAPABILITIES_INIT(it) memset(it, 0, sizeof *(it))
typedef struct {
    WDF_TRI_STATE DontDisplayInUI;
} WDF_DEVICE_STATE;
#define WDF_DEVICE_STATE_INIT(it) memset(it, 0, sizeof *(it))
typedef enum { WdfDevStatePnpStarted = 0x119 } WDF_DEVICE_PNP_STATE;
#define WdfDeviceInitSetDeviceType(init, type) ((void)0)
#define WdfDeviceInitSetExclusive(init, exclusive) ((void)0)
#define WdfPdoInitAssignRawDevice(init, class) STATUS_SUCCESS
#define WdfDeviceInitAssignSDDLString(init, rights) STATUS_SUCCESS
#define WdfPdoInitAssignDeviceID(init, name) STATUS_SUCCESS
#define WdfPdoInitAddHardwareID(init, name) STATUS_SUCCESS
#define WdfPdoInitAssignInstanceID(init, name) STATUS_SUCCESS
#define WdfPdoInitAddDeviceText(init, name, location, locale) STATUS_SUCCESS
#define WdfPdoInitSetDefaultLocale(init, locale) ((void)0)
#define WdfDeviceSetPnpCapabilities(device, it) ((void)0)
#define WdfDeviceSetDeviceState(device, it) ((void)0)
#define WdfDeviceSetBusInformationForChildren(device, it) ((void)0)
#define WdfDeviceWdmGetPhysicalDevice(device) ((PDEVICE_OBJECT)(device))
WDF_DEVICE_PNP_STATE WdfDeviceGetDevicePnpState(WDFDEVICE);
NTSTATUS WdfDeviceCreateSymbolicLink(WDFDEVICE, PCUNICODE_STRING);
WDFDRIVER WdfDeviceGetDriver(WDFDEVICE);

/* Memory and locks. */

NTSTATUS WdfLookasideListCreate(PWDF_OBJECT_ATTRIBUTES, size_t, POOL_TYPE, PWDF_OBJECT_ATTRIBUTES,
                                ULONG, WDFLOOKASIDE *);
NTSTATUS WdfMemoryCreateFromLookaside(WDFLOOKASIDE, WDFMEMORY *);
PVOID WdfMemoryGetBuffer(WDFMEMORY, size_t *);
NTSTATUS WdfWaitLockCreate(PWDF_OBJECT_ATTRIBUTES, WDFWAITLOCK *);
NTSTATUS WdfWaitLockAcquire(WDFWAITLOCK, PLONGLONG);
VOID WdfWaitLockRelease(WDFWAITLOCK);
#endif

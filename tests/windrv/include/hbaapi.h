/* The HBA API (SNIA): the values in vioscsi's answers to WMI. */
#define HBA_STATUS_OK 0
#define HBA_PORTTYPE_SASDEVICE 30
#define HBA_PORTSTATE_ONLINE 2

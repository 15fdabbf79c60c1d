//! Words of the languages that targets parse.

use container::settings::translate::table::TABLE;
use devices::registry::KINDS;
use vmm::config::OPTIONS;
use vmm::control::COMMANDS;

fn of(words: &[&[u8]]) -> Vec<Vec<u8>> {
    words.iter().map(|word| word.to_vec()).collect()
}

fn and<'a>(words: &[&'a str], more: impl IntoIterator<Item = &'a str>) -> Vec<Vec<u8>> {
    let words = words.iter().copied().chain(more);
    words.map(|word| word.as_bytes().to_vec()).collect()
}

/// Parts of the agent's answers.
pub(crate) fn agent() -> Vec<Vec<u8>> {
    of(AGENT)
}

/// Replies of download pages, and notes on unfinished downloads.
pub(crate) fn download() -> Vec<Vec<u8>> {
    and(
        &[
            "{\"Skus\":[{\"Id\":\"19001\",\"Language\":\"German\"}]}",
            "{\"ProductDownloadOptions\":[{\"Uri\":\"https://a.microsoft.com/x\",\"DownloadType\":1}]}",
            "{\"Errors\":[{\"Value\":\"Sentinel\",\"Type\":9}]}",
            "&w=8DF26E07265FC0D",
            "rticks=\"+1791644954371",
            "<option value=\"3813\">Windows",
            ">German 64-bit</td><td>",
            "https://go.microsoft.com/fwlink/p/?LinkID=1&culture=en-us&country=us\"",
            "{\"length\":41945088,\"done\":[[0,4194304]]}",
            "bytes 0-9/100",
            "<File ",
            "</File>",
            "<Architecture>x64</Architecture>",
            "<Edition>Professional</Edition>",
            "<LanguageCode>de-de</LanguageCode>",
            "<FilePath>http://a.microsoft.com/x</FilePath>",
        ],
        ["MSCF\0\0\0\0", "CK", "//", "://", "@", "%2f", "\r\n", "[::1]", "#sha256="],
    )
}

/// Requests, forms, cookies and frames.
pub(crate) fn browser() -> Vec<Vec<u8>> {
    of(BROWSER)
}

/// Beginnings and contents of RFB messages.
pub(crate) fn viewer() -> Vec<Vec<u8>> {
    of(VIEWER)
}

/// Values of variables, with QEMU's words.
pub(crate) fn environment() -> Vec<Vec<u8>> {
    and(ENVIRONMENT, TABLE.iter().flat_map(|row| row.words).copied())
}

/// Parts of answer files, and a guest's reports.
pub(crate) fn answer() -> Vec<Vec<u8>> {
    and(ANSWER, [])
}

/// Lines of the serial port while Windows is installed.
pub(crate) fn reports() -> Vec<Vec<u8>> {
    and(REPORTS, [])
}

/// Options and configuration files.
pub(crate) fn user() -> Vec<Vec<u8>> {
    and(USER, KINDS.iter().copied().chain(OPTIONS.iter().map(|option| option.key)))
}

/// Commands of the control socket, in JSON and as users type them.
pub(crate) fn control() -> Vec<Vec<u8>> {
    and(CONTROL, COMMANDS.iter().map(|command| command.name))
}

/// Lines of a resolv.conf.
pub(crate) fn resolvers() -> Vec<Vec<u8>> {
    of(RESOLVERS)
}

/// Requests to the pod's own pages and API.
pub(crate) fn api() -> Vec<Vec<u8>> {
    and(API, [])
}

/// Requests of commands in the container.
pub(crate) fn inquiry() -> Vec<Vec<u8>> {
    and(INQUIRY, [])
}

/// Parts of the first packets of a remote desktop, and of frames.
pub(crate) fn desktop() -> Vec<Vec<u8>> {
    let packet =
        |code: u8, kind: u8| vec![3, 0, 0, 19, 14, code, 0, 0, 0, 0, 0, kind, 0, 8, 0, 3, 0, 0, 0];
    let send = [3, 0, 0, 46, 2, 0xf0, 0x80, 0x64, 0, 7, 3, 0xeb, 0x70, 32, 0x40, 0, 0, 0];
    let mut parts = vec![vec![0], vec![1], vec![2]];
    parts.extend([packet(0xe0, 1), packet(0xd0, 2), packet(0xd0, 3), send.to_vec()]);
    parts.extend([vec![0x30, 0x82, 0, 4, 1, 2, 3, 4], vec![0x30, 2, 0, 0], vec![0x80, 40]]);
    parts.push(vec![0x16, 3, 3, 0, 4, 2, 0, 0, 0]);
    parts
}

/// Requests of QMP, and lines of the human monitor.
pub(crate) fn qmp() -> Vec<Vec<u8>> {
    and(QMP, [])
}

/// The XML data of a WIM.
pub(crate) fn wim() -> Vec<Vec<u8>> {
    and(WIM, [])
}

const QMP: &[&str] = &[
    "\0",
    "\u{1}",
    "\u{2}",
    "\u{3}",
    "{\"execute\":\"qmp_capabilities\"}",
    "{\"execute\":\"",
    "\",\"arguments\":{",
    "\",\"id\":",
    "\"}",
    "}}",
    "query-commands",
    "query-status",
    "system_reset",
    "send-key",
    "\"keys\":[{\"type\":\"qcode\",\"data\":\"ctrl\"}]",
    "screendump",
    "\"filename\":\"/tmp/x.ppm\",\"format\":\"png\"",
    "device_add",
    "\"driver\":\"usb-host\"",
    "device_del",
    "\"id\":\"x\"",
    "human-monitor-command",
    "\"command-line\":\"info qtree\"",
    "info usb\n",
    "info status\r\n",
    "sendkey ctrl-alt-delete\n",
    "screendump -f png /tmp/x.png\n",
    "device_add usb-host,id=x\n",
    "\u{ff}",
];

const REPORTS: &[&str] = &[
    "\r\n",
    "transom-report: ",
    "windows-pe",
    "began ",
    "failed ",
    "find-image",
    "partition",
    "apply-image",
    "boot",
    "copy",
    "setup",
    "applied",
    "specialize",
    "setup-complete",
    "logged-on",
    "install-started",
    "install-ended ",
    "-2147483649",
    "ready",
    "log-begins",
    "log ",
    "\u{202e}",
    "\u{1b}[",
    "[====",
    "43.0%",
    " ]",
    "BdsDxe: starting Boot0001 \"DVD-ROM\" from ",
    "Pci(0x1)",
    "HD(1)",
];

const WIM: &[&str] = &[
    "<WIM>",
    "</WIM>",
    "<IMAGE INDEX=\"1\">",
    "<IMAGE INDEX='4294967295'>",
    "</IMAGE>",
    "<WINDOWS>",
    "</WINDOWS>",
    "<ARCH>9</ARCH>",
    "<ARCH>12</ARCH>",
    "<EDITIONID>ServerStandardEval</EDITIONID>",
    "<EDITIONID>Professional</EDITIONID>",
    "<INSTALLATIONTYPE>Server Core</INSTALLATIONTYPE>",
    "<LANGUAGES><LANGUAGE>ko-KR</LANGUAGE><DEFAULT>ko-KR</DEFAULT></LANGUAGES>",
    "<VERSION><BUILD>26100</BUILD><SPBUILD>99999999999</SPBUILD></VERSION>",
    "<NAME>",
    "</NAME>",
    "<DISPLAYNAME/>",
    "Windows 11 Pro",
    "&amp;",
    "&#x1b;",
    "&#x110000;",
    "&lt",
    "<!--",
    "-->",
    "<?xml",
    "?>",
    "<![CDATA[",
    "\u{feff}",
    "\u{202e}",
    "=",
    "'",
    "<",
    ">",
];

const ANSWER: &[&str] = &[
    "<?xml version=\"1.0\" encoding=\"utf-16\"?>",
    "<unattend>",
    "</unattend>",
    "<component name=\"Microsoft-Windows-Setup\">",
    "<component name='Microsoft-Windows-Shell-Setup'>",
    "</component>",
    "<DiskID>",
    "</DiskID>",
    "<DiskID/>",
    "<Disk>",
    "</Disk>",
    "<InstallTo>",
    "<UserData>",
    "</UserData>",
    "<ProductKey>",
    "</ProductKey>",
    "<UseConfigurationSet>",
    "<AutoLogon>",
    "</AutoLogon>",
    "<Password/>",
    "<u:Password>",
    "<Value>",
    "<UILanguage>",
    "<!--",
    "-->",
    "<![CDATA[",
    "]]>",
    "&amp;",
    "&#65;",
    "&#x1F600;",
    " wcm:action=\"add\"",
    "\u{feff}",
    "\u{fffe}",
    "transom-report: ",
    "install-ended ",
    "failed partition",
    "-1073741510",
];

const API: &[&str] = &[
    "GET ",
    "POST ",
    "HEAD ",
    "/api/v1/state",
    "/api/v1/screenshot",
    "/api/v1/power",
    "/api/v1/media",
    "/api/v1/usb",
    "/api/openapi.json",
    "/metrics",
    "/log",
    "/status",
    "/msg.html",
    "/healthz",
    "/readyz",
    "/startupz",
    "/pod/pod.js",
    "/pod/..%2f..%2fsecret",
    "?after=1",
    "?after=18446744073709551616&wait=true",
    " HTTP/1.1\r\nHost: 10.0.0.1:8006\r\n",
    " HTTP/1.1\r\nHost: vm.example\r\n",
    "Origin: http://10.0.0.1:8006\r\n",
    "Origin: null\r\n",
    "Content-Type: application/json\r\n",
    "Connection: close\r\n",
    "Content-Length: 20\r\n\r\n",
    "Content-Length: 60\r\n\r\n",
    "Transfer-Encoding: chunked\r\n\r\n",
    "3c\r\n",
    "\r\n",
    "{\"action\": \"reset\"}",
    "{\"action\": \"shutdown\"}",
    "{\"action\": ",
    "{\"drive\": \"cd0\", \"path\": \"",
    "{\"attach\": {\"path\": \"",
    "{\"detach\": {\"name\": \"x\"}}",
    "VOLUME/disk.img",
    "VOLUME/../secret",
    "VOLUME/link",
    "/proc/self/environ",
    "/etc/passwd",
    "../secret",
    "\"}}",
    "\"}",
    ",",
    "\u{1b}[2J",
    "\u{1f600}",
];

const INQUIRY: &[&str] = &[
    "{\"ask\": \"state\"}\n",
    "{\"ask\": \"health\", \"of\": \"ready\"}\n",
    "{\"ask\": \"health\", \"of\": ",
    "{\"ask\": \"log\", \"after\": 0, \"wait\": false}\n",
    "{\"ask\": \"log\", \"after\": 18446744073709551615, \"wait\": false}\n",
    "{\"ask\": \"shutdown\"}\n",
    "{\"ask\": \"start\", \"program\": \"x\", \"words\": []}\n",
    "{\"ask\": \"start\", \"program\": \"",
    "\", \"words\": [\"",
    "\"], \"input\": \"",
    "\"}\n",
    "{\"ask\": \"outcome\", \"pid\": -1}\n",
    "{\"ask\": \"outcome\", \"pid\": ",
    "9223372036854775808",
    "1e9}\n",
    "}\n",
    "\n",
    "[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[",
    "\u{0}",
    "\u{1f600}",
    "null",
    ",",
];

const RESOLVERS: &[&[u8]] = &[
    b"nameserver ",
    b"search ",
    b"domain ",
    b"options ",
    b"ndots:",
    b"timeout:9999999999999999999999 ",
    b"10.0.0.1 ",
    b"::1%eth0 ",
    b"a.b.c. ",
    b".. ",
    b"\n",
    b"\xff\xfe ",
];

const AGENT: &[&[u8]] = &[
    b"\xff",
    b"\n",
    b"{\"return\": ",
    b"{\"error\": ",
    b"{\"class\": \"GenericError\", \"desc\": \"no\"}",
    b"{\"class\": 7}",
    b"7",
    b"7}\n",
    b"\xff{\"return\": 7}\n",
    b"}",
    b"}\n",
    b"[",
    b"]",
    b"[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[",
    b",",
    b"{\"exited\": true",
    b"{\"exited\": false}",
    b", \"exitcode\": ",
    b", \"exitcode\": -1}",
    b", \"signal\": 9}",
    b", \"out-data\": \"aGkK\"",
    b", \"err-data\": \"a",
    b", \"out-truncated\": true}",
    b"18446744073709551616",
    b"-9223372036854775809",
    b"1e999",
    b"{\"pretty-name\": \"a\\u001b[2J\"}",
    b"{\"ip-addresses\": [{\"ip-address\": \"fe80::1%2\"}]}",
    b"{\"ip-addresses\": ",
    b"\"\\ud800\"",
    b"\"",
    b"null",
    b" ",
    b"\0",
];

const BROWSER: &[&[u8]] = &[
    b"GET / HTTP/1.1\r\n",
    b"GET /session HTTP/1.1\r\n",
    b"GET /login HTTP/1.1\r\n",
    b"GET /websockify HTTP/1.1\r\n",
    b"GET /files/../index.html HTTP/1.1\r\n",
    b"GET /files/%2e%2e/%00 HTTP/1.0\r\n",
    b"POST /login HTTP/1.1\r\n",
    b"POST /logout HTTP/1.1\r\n",
    b"Host: 10.0.0.1\r\n",
    b"Host: vm.example:80\r\n",
    b"Origin: null\r\n",
    b"Origin: http://10.0.0.1\r\n",
    b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n",
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n",
    b"Content-Length: 20\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"X-Forwarded-For: 127.0.0.1\r\nX-Forwarded-Host: a, b\r\n",
    b"\r\n",
    b"password=",
    b"user=me&",
    b"%zz%41+%",
    b"transom=",
    b"; transom80=0; ",
    b"http://vm.example",
    b"https://vm.example:443",
    b"bWU6bm9wZQ==",
    &[0x82, 0x8c, 0, 0, 0, 0, b'R', b'F', b'B', b' ', b'0', b'0', b'3', b'.', b'0', b'0', b'8', 10],
    &[0x82, 0x82, 0, 0, 0, 0, 1, 1],
    &[0x02, 0x81, 0, 0, 0, 0, 3],
    &[0x80, 0x80, 0, 0, 0, 0],
    &[0x89, 0x80, 0, 0, 0, 0],
    &[0x82, 0xff, 0, 0, 0, 0, 0, 0x1f, 255, 255, 0, 0, 0, 0],
];

const VIEWER: &[&[u8]] = &[
    b"RFB 003.003\n",
    b"RFB 003.007\n\x02",
    b"RFB 003.008\n\x02",
    b"RFB 003.889\n\x13\0\x02",
    b"GET / HTTP/1.1\r\n\r\n",
    &[0, 0, 0, 0, 32, 24, 0, 1, 0, 255, 0, 255, 0, 255, 16, 8, 0, 0, 0, 0],
    &[0, 0, 0, 0, 8, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    &[0, 0, 0, 0, 16, 16, 1, 1, 0, 31, 0, 63, 0, 31, 11, 5, 0, 0, 0, 0],
    &[2, 0, 0, 3, 0, 0, 0, 7, 255, 255, 255, 32, 255, 255, 254, 0xcc],
    &[2, 0, 0, 2, 0, 0, 0, 16, 255, 255, 254, 0xc8],
    &[2, 0, 0, 3, 0, 0, 0, 5, 0xc0, 0xa1, 0xe5, 0xce, 255, 255, 255, 33],
    &[2, 0, 0, 4, 0, 0, 0, 6, 255, 255, 255, 32, 255, 255, 254, 0xc7, 255, 255, 254, 0xcc],
    &[2, 0, 0, 3, 0, 0, 0, 1, 0, 0, 0, 5, 255, 255, 255, 33],
    &[3, 0, 0, 0, 0, 0, 255, 255, 255, 255],
    &[3, 1, 0, 0, 0, 0, 255, 255, 255, 255],
    &[4, 1, 0, 0, 0, 0, 255, 0xe1],
    &[5, 0x81, 0, 9, 0, 9],
    b"\x06\0\0\0\0\0\0\x03abc",
    &[6, 0, 0, 0, 255, 255, 255, 252, 2, 0, 0, 1],
    &[6, 0, 0, 0, 255, 255, 255, 240, 16, 0, 0, 1, 0x78, 1, 3, 0, 0, 0, 0, 1, 0, 0, 0, 0],
    &[150, 1, 0, 0, 0, 0, 255, 255, 255, 255],
    &[248, 0, 0, 0, 0x80, 0, 0, 4, 2, 7, 7],
    &[250, 0, 1, 4],
    &[251, 0, 2, 128, 1, 224, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 128, 1, 224, 0, 0, 0, 0],
    &[255, 0, 0, 1, 0, 0, 0, 0x61, 0, 0, 0, 0x1e],
    &[2, 0, 0, 1, 255, 255, 254, 0xfd],
    &[255, 1, 0, 2, 3, 2, 0, 0, 0xbb, 0x80],
    &[255, 1, 0, 2, 0, 1, 0, 0, 0x1f, 0x40],
    &[255, 1, 0, 0],
    &[255, 1, 0, 1],
];

const ENVIRONMENT: &[&str] = &[
    "=",
    ",",
    ",,",
    ":",
    " ",
    "\"",
    "'",
    "\\",
    "-",
    "--",
    "+",
    "/",
    "..",
    "@",
    "%",
    "0",
    "1",
    "130",
    "65536",
    "4294967296",
    "18446744073709551616",
    "1e999",
    ".5",
    "8G",
    "half",
    "max",
    "inf",
    "NaN",
    "y",
    "off",
    "file=/x",
    "id=a",
    "drive=a",
    "if=none",
    "if=virtio",
    "media=cdrom",
    "type=1",
    "serial=",
    "string=x",
    "name=opt/x",
    "base=utc",
    "sockets=2",
    "threads=",
    "https://",
    "?",
    "#",
    ".iso",
    "\u{e9}",
    "\u{130}",
    "\u{202e}",
    "\u{0}",
    "\n",
    "\u{1b}[2J",
    "\u{1f600}",
];

const USER: &[&str] = &[
    "=", ",", ",,", ":", "0x", "-1", "4G", "1", "65536", "1e999", "on", "path", "slot", "03.0",
    "to", "socket:", "tap:", "fd:3", "\"", "{", "}", "[", "]", "\u{e9}",
];

const CONTROL: &[&str] = &[
    "{\"command\": \"",
    "\", \"",
    "\": \"",
    "\"}\n",
    "}\n",
    " ",
    "name",
    "size",
    "state",
    "mtu",
    "1G",
    "up",
    "70000",
    "-1",
    "\u{e9}",
    "\n",
];

"""Texts to decode where the user gives none; written for this package."""

SENTENCES = (
    # Everyday language.
    "Where did you leave the keys to the cellar?",
    "My brother has been living in Hamburg for three years.",
    "We missed the last bus and had to walk home in the rain.",
    "The bakery on the corner opens at six o'clock.",
    "She would rather stay at home tonight and read a book.",
    "Could you please close the window before you leave?",
    "The children are playing in the garden behind the house.",
    "I have never seen so many stars in the sky.",
    "Tom asked Mary to help him with the broken bicycle.",
    "If it does not rain tomorrow, we will go to the lake.",
    "He forgot to buy milk, so we are drinking our coffee black.",
    "The train was twenty minutes late this morning.",
    "Nobody knew why the old man was laughing.",
    "You should see a doctor about that cough.",
    "They have painted the front door green.",
    "I do not understand what this word means.",
    "Our neighbours are going on holiday next week.",
    "The soup is too hot to eat.",
    "How long does it take to get to the airport?",
    "She speaks English better than her teacher.",
    "Is there a pharmacy near the station?",
    "The cat is sleeping on the warm stones.",
    "I wanted to call you, but my phone was broken.",
    "He works in a factory and comes home late in the evening.",
    "What would you do if you had more time?",
    "The museum by the old harbour is closed on Mondays.",
    "Please write your name and address on this sheet of paper.",
    "Tom says that he has no money.",
    "We have known each other since we were at school.",
    "It was so cold that the river froze.",
    # Of programs: messages, help, descriptions of packages.
    "The file with the saved bookmarks could not be opened.",
    "This package contains what you need to write programs with the library.",
    "Select the folder in which the backups are stored.",
    "Not enough free space on the device.",
    "Enter the name of the new user.",
    "Print the version number and exit.",
    "This option is ignored if the file does not exist.",
    "The connection to the server was closed.",
    "Do you want to save the drawing before the window is closed?",
    "Click the button to insert a new row into the table.",
    "Unable to read the configuration file.",
    "The password must have at least eight characters.",
    "Choose the language that you want to use for the menus.",
    "This library provides functions to read and write images.",
    "The command returns an error if the argument is missing.",
    "Show hidden files in the list.",
    "A new version of this program is available.",
    "The selected cells are merged into one cell.",
    "Install the documentation as well if you want to read it offline.",
    "Cannot create the directory.",
    "Opens a dialog in which you can change the settings of the printer.",
    "This program converts text files into web pages.",
    "The date format depends on the language of the system.",
    "Do not ask again for files of this type.",
    "The number of lines shown on each page.",
    "The certificate has expired and is no longer valid.",
    "This package provides the German translation of the manual.",
    "Sort the results by name, size or date.",
    "Restart the computer to finish the installation.",
    "The value in the first column is used as the title of the chart.",
)

DESCRIPTIONS = (
    "Lanternfish is a small program that watches directories and copies every file that changes "
    "to another disk. It starts with the session, needs no server and keeps the last ten "
    "versions of each file. Old versions can be restored from a simple window or from the "
    "command line.",
    "This library reads and writes the archive format that is used by several flight "
    "simulators. It supports compressed and encrypted archives, checks the sums of all members "
    "and never loads more than one member into memory. This package contains the header files "
    "and the static library that are needed to build programs with it.",
    "Quillpad is a text editor for people who write long documents. It shows one paragraph at a "
    "time, counts words and pages while you type and saves after every sentence. Documents are "
    "plain text files with a few marks for headings, lists and footnotes.",
    "A set of command line tools for measuring the quality of wireless networks. The tools send "
    "small packets at regular intervals, record how many of them are lost and how long the "
    "others take, and draw the result as a graph in the terminal.",
    "This module offers a simple interface to the time zone database. Given the name of a city "
    "or a pair of coordinates it returns the local time, the offset from universal time and the "
    "dates on which the clocks change. It has no dependencies outside of the standard library.",
    "Pebblestack is a puzzle game in which stones of different shapes fall into a well and have "
    "to be piled up without leaving holes. There are forty levels, a mode for two players at one "
    "keyboard and an editor for levels of one's own. This package contains the graphics and "
    "sounds of the game.",
    "Corvid is a mail filter that sorts incoming messages into folders. Rules are written in a "
    "small language and can look at the headers, the size and the text of a message. It can be "
    "called by any mail server that hands messages to a program.",
    "This package provides the documentation of the Marlin numerical library in HTML and PDF. "
    "It explains how matrices are stored, lists all functions with their arguments and shows "
    "how to solve systems of linear equations, to find eigenvalues and to fit curves to data.",
    "A plugin for the Harbour web server that limits the number of requests a client may make "
    "in a given time. Clients are told apart by their address or by a token. The counters are "
    "kept in shared memory, so that all processes of the server see the same values.",
    "Starling turns a folder of photos into a web gallery. It makes thumbnails, reads the date "
    "and the place from each photo and writes static pages that need no database. Several "
    "themes are included and new ones can be made with templates.",
    "This package contains the debugging symbols for the Tern media player. Install it if you "
    "want to report a crash of the player, or to follow what the program does in a debugger. It "
    "is not needed to use the player.",
    "Brooklet is a library for streaming data between threads. A stream has one writer and any "
    "number of readers, and readers that are too slow may skip what they have missed. It is "
    "written in C and makes no system calls while data is flowing.",
    "Osier is a monitor for servers. It collects the load, the use of memory and disks and the "
    "traffic of each network card, keeps the figures for a year and shows them on a web page. "
    "It can send a message when a value is too high for too long. This package contains the "
    "agent, which has to be installed on every machine that is to be watched.",
    "The program reads music in a plain text notation and prints it as sheet music. It knows "
    "notes, chords, lyrics and the signs of most instruments, breaks lines where it looks best "
    "and can transpose a piece into another key. Output is possible as PDF, SVG or MIDI.",
    "Fernweh plans journeys by public transport. It reads timetables in the common exchange "
    "format, finds the fastest connection or the one with the fewest changes and works without "
    "a connection to the internet. Maps are not included.",
    "A fast parser for tables in text files. It finds out by itself which character separates "
    "the columns, whether there is a header and which columns hold numbers or dates. Files that "
    "are larger than the memory are read in pieces. This package contains the module for "
    "Python 3.",
    "Gannet is a download manager for the terminal. It fetches several parts of a file at the "
    "same time, continues downloads that were interrupted and checks the result against a "
    "checksum if there is one. The speed can be limited for certain hours of the day.",
    "This package contains the Finnish dictionary for the Larch spell checker. The dictionary "
    "has about two hundred thousand words and knows the rules by which they are inflected and "
    "combined.",
    "Thimble is a tool for testing web services. A test describes a request and what the answer "
    "has to look like. Tests can use values from earlier answers, run one after the other or "
    "all at once, and their results can be written in the formats that build servers "
    "understand.",
    "A collection of fonts for technical drawings. The letters follow the standards for "
    "lettering in engineering and are available upright and slanted, in three widths. They "
    "contain all characters that are used in European languages, mathematical signs and arrows.",
    "Saltmarsh is a simulator of tides and currents in shallow water. It solves the equations on "
    "a grid of triangles, runs on many processors at once and writes its results in a format "
    "that common visualization programs can read. This package contains the programs, "
    "the examples are in a package of their own.",
    "This daemon controls the fans of a computer. It reads the temperatures of the processor, "
    "the disks and the graphics card and turns the fans only as fast as necessary. A file "
    "describes which fan cools which part, and a small program helps to write it.",
    "Inkwell is a client for several chat networks with a graphical interface. It keeps the "
    "history of all conversations in one place, lets you search it and shows messages of "
    "different networks in one list. Messages can be encrypted from end to end if the other "
    "side supports it.",
    "A small language for describing diagrams. Boxes, arrows and labels are written as lines of "
    "text, and the program places them so that few arrows cross. It is useful for drawings "
    "that are kept together with source code, because changes are easy to review. This package "
    "contains the compiler and its manual page.",
)
